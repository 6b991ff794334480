//! Frames on a byte stream: u32 little endian length, then that many bytes of UTF-8 JSON.

use std::io::{self, Read, Write};

/// Longest body in bytes; a longer one ends the connection, since nothing after it can be trusted.
pub const FRAME_BYTES_MAX: usize = 1 << 20;

/// Why a frame could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    #[error("frame of {length} bytes is over the limit of {FRAME_BYTES_MAX}")]
    TooLong { length: usize },
    #[error("the connection ended inside a frame")]
    Truncated,
    #[error("the connection failed")]
    Io(#[source] io::Error),
}

/// The body of the next frame, or None at a clean end of the stream.
pub fn read_frame(stream: &mut impl Read) -> Result<Option<Vec<u8>>, FrameError> {
    let mut head = [0u8; 4];
    match read_full(stream, &mut head)? {
        0 => return Ok(None),
        4 => {}
        _ => return Err(FrameError::Truncated),
    }
    let length = u32::from_le_bytes(head) as usize;
    if length > FRAME_BYTES_MAX {
        return Err(FrameError::TooLong { length });
    }
    let mut body = vec![0u8; length];
    if read_full(stream, &mut body)? != length {
        return Err(FrameError::Truncated);
    }
    Ok(Some(body))
}

/// One frame in one write, so that a frame is never torn by another thread that writes under the same lock.
pub fn write_frame(stream: &mut impl Write, body: &[u8]) -> Result<(), FrameError> {
    if body.len() > FRAME_BYTES_MAX {
        return Err(FrameError::TooLong { length: body.len() });
    }
    let length = u32::try_from(body.len()).map_err(|_| FrameError::TooLong { length: body.len() })?;
    let mut frame = Vec::with_capacity(4 + body.len());
    frame.extend_from_slice(&length.to_le_bytes());
    frame.extend_from_slice(body);
    stream.write_all(&frame).map_err(FrameError::Io)
}

/// Fills the buffer as far as the stream goes; fewer bytes than asked mean that the stream ended.
fn read_full(stream: &mut impl Read, buffer: &mut [u8]) -> Result<usize, FrameError> {
    let mut filled = 0;
    while filled < buffer.len() {
        match stream.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(FrameError::Io(error)),
        }
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_length_then_body() {
        let mut bytes = Vec::new();
        write_frame(&mut bytes, b"{}").unwrap();
        assert_eq!(bytes, [2, 0, 0, 0, b'{', b'}']);
        assert_eq!(read_frame(&mut &bytes[..]).unwrap().unwrap(), b"{}");
    }

    #[test]
    fn the_end_between_frames_is_clean_and_inside_one_is_not() {
        assert!(read_frame(&mut &b""[..]).unwrap().is_none());
        assert!(matches!(
            read_frame(&mut &b"\x02\0\0\0{"[..]),
            Err(FrameError::Truncated)
        ));
        assert!(matches!(read_frame(&mut &b"\x02\0"[..]), Err(FrameError::Truncated)));
    }

    #[test]
    fn a_length_over_the_limit_is_refused_before_anything_is_allocated() {
        let head = u32::MAX.to_le_bytes();
        assert!(matches!(read_frame(&mut &head[..]), Err(FrameError::TooLong { .. })));
        assert!(matches!(
            write_frame(&mut Vec::new(), &vec![0; FRAME_BYTES_MAX + 1]),
            Err(FrameError::TooLong { .. })
        ));
    }
}
