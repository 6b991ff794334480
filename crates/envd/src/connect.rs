//! The Connect protocol as the E2B clients speak it: JSON messages, unary bodies and enveloped streams.
//!
//! Owns the error codes and the framing; knows no service. Written by hand because the kept Connect crates
//! need protobuf code generation and bring several times this module's code to a guest that runs emulated.
//!
//! A stream is a sequence of envelopes: one flag byte, a big-endian u32 length, then the payload. Flag 0 is a
//! message; flag 2 ends the stream with `{}` or `{"error":{...}}`. Compressed messages (flag bit 1) are
//! refused, since neither SDK sends them.

use bytes::{BufMut, Bytes, BytesMut};
use serde::Serialize;

/// Longest message accepted from a client. `SendInput` carries base64 text, so about 6 MiB of input.
pub const MESSAGE_BYTES_MAX: usize = 8 << 20;

const FLAG_COMPRESSED: u8 = 0b01;
const FLAG_END: u8 = 0b10;
const HEADER_BYTES: usize = 5;

/// Error codes of the Connect protocol that this daemon uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Aborted,
    Unimplemented,
    Internal,
    Unauthenticated,
}

impl Code {
    /// Name on the wire and HTTP status of a unary answer, as the protocol fixes them.
    pub fn wire(self) -> (&'static str, u16) {
        match self {
            Code::InvalidArgument => ("invalid_argument", 400),
            Code::DeadlineExceeded => ("deadline_exceeded", 504),
            Code::NotFound => ("not_found", 404),
            Code::AlreadyExists => ("already_exists", 409),
            Code::PermissionDenied => ("permission_denied", 403),
            Code::ResourceExhausted => ("resource_exhausted", 429),
            Code::FailedPrecondition => ("failed_precondition", 400),
            Code::Aborted => ("aborted", 409),
            Code::Unimplemented => ("unimplemented", 501),
            Code::Internal => ("internal", 500),
            Code::Unauthenticated => ("unauthenticated", 401),
        }
    }
}

/// A failed call: what the client sees.
#[derive(Debug, thiserror::Error)]
#[error("{}: {message}", code.wire().0)]
pub struct RpcError {
    pub code: Code,
    pub message: String,
}

#[derive(Serialize)]
struct ErrorBody<'a> {
    code: &'static str,
    message: &'a str,
}

impl RpcError {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        RpcError {
            code,
            message: message.into(),
        }
    }

    /// An operation on `what` failed in the operating system; the code follows from the kind.
    pub fn from_io(what: &str, error: &std::io::Error) -> Self {
        use std::io::ErrorKind as K;
        let code = match error.kind() {
            K::NotFound => Code::NotFound,
            K::AlreadyExists => Code::AlreadyExists,
            K::PermissionDenied => Code::PermissionDenied,
            K::NotADirectory | K::IsADirectory | K::InvalidInput | K::InvalidFilename => Code::InvalidArgument,
            K::StorageFull | K::QuotaExceeded => Code::ResourceExhausted,
            K::DirectoryNotEmpty | K::CrossesDevices => Code::FailedPrecondition,
            _ => Code::Internal,
        };
        RpcError::new(code, format!("{what}: {error}"))
    }

    /// JSON body of a unary error answer.
    pub fn body(&self) -> Bytes {
        let body = ErrorBody {
            code: self.code.wire().0,
            message: &self.message,
        };
        serde_json::to_vec(&body).unwrap_or_default().into()
    }

    /// Appends the end-of-stream envelope that carries this error.
    pub fn put_end(&self, out: &mut BytesMut) {
        let body = self.body();
        let mut payload = Vec::with_capacity(body.len() + 12);
        payload.extend_from_slice(b"{\"error\":");
        payload.extend_from_slice(&body);
        payload.push(b'}');
        put_envelope(out, FLAG_END, &payload);
    }
}

/// Appends one message envelope.
pub fn put_message(out: &mut BytesMut, payload: &[u8]) {
    put_envelope(out, 0, payload);
}

/// Appends the envelope that ends a stream without error.
pub fn put_end_ok(out: &mut BytesMut) {
    put_envelope(out, FLAG_END, b"{}");
}

fn put_envelope(out: &mut BytesMut, flags: u8, payload: &[u8]) {
    out.reserve(HEADER_BYTES + payload.len());
    out.put_u8(flags);
    // Payloads are bounded far below u32 by the 32 KiB data limit and the message limit.
    out.put_u32(u32::try_from(payload.len()).unwrap_or(u32::MAX));
    out.put_slice(payload);
}

/// Takes the envelopes of a request body apart as bytes arrive.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: BytesMut,
}

impl Decoder {
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole message, `None` while more bytes are needed. End envelopes of the client are skipped.
    pub fn next_message(&mut self) -> Result<Option<Bytes>, RpcError> {
        loop {
            let Some(header) = self.buffer.first_chunk::<HEADER_BYTES>() else {
                return Ok(None);
            };
            let [flags, a, b, c, d] = *header;
            let length = u32::from_be_bytes([a, b, c, d]) as usize;
            if flags & FLAG_COMPRESSED != 0 {
                return Err(RpcError::new(
                    Code::Unimplemented,
                    "compressed messages are not supported",
                ));
            }
            if length > MESSAGE_BYTES_MAX {
                let text = format!("message of {length} bytes is over the limit of {MESSAGE_BYTES_MAX} bytes");
                return Err(RpcError::new(Code::ResourceExhausted, text));
            }
            if self.buffer.len() < HEADER_BYTES + length {
                return Ok(None);
            }
            let _ = self.buffer.split_to(HEADER_BYTES);
            let payload = self.buffer.split_to(length).freeze();
            if flags & FLAG_END == 0 {
                return Ok(Some(payload));
            }
        }
    }

    /// Whether the stream stopped in the middle of an envelope.
    pub fn is_partial(&self) -> bool {
        !self.buffer.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn envelopes_have_the_exact_bytes_of_the_protocol() {
        let mut out = BytesMut::new();
        put_message(&mut out, b"{}");
        put_end_ok(&mut out);
        RpcError::new(Code::NotFound, "x").put_end(&mut out);
        let error = b"{\"error\":{\"code\":\"not_found\",\"message\":\"x\"}}";
        let mut want = b"\x00\x00\x00\x00\x02{}\x02\x00\x00\x00\x02{}\x02\x00\x00\x00\x2c".to_vec();
        want.extend_from_slice(error);
        assert_eq!(&out[..], &want[..]);
    }

    #[test]
    fn messages_are_found_however_the_bytes_are_cut() {
        let mut wire = BytesMut::new();
        put_message(&mut wire, b"{\"a\":1}");
        put_message(&mut wire, b"");
        put_end_ok(&mut wire);
        let mut decoder = Decoder::default();
        let mut got = Vec::new();
        for byte in wire.iter() {
            decoder.push(&[*byte]);
            while let Some(message) = decoder.next_message().unwrap() {
                got.push(message);
            }
        }
        assert_eq!(got, vec![Bytes::from_static(b"{\"a\":1}"), Bytes::new()]);
        assert!(!decoder.is_partial());
    }

    #[test]
    fn oversized_and_compressed_messages_are_refused() {
        let mut decoder = Decoder::default();
        decoder.push(&[0, 0xff, 0xff, 0xff, 0xff]);
        assert_eq!(decoder.next_message().unwrap_err().code, Code::ResourceExhausted);
        let mut decoder = Decoder::default();
        decoder.push(&[1, 0, 0, 0, 0]);
        assert_eq!(decoder.next_message().unwrap_err().code, Code::Unimplemented);
    }
}
