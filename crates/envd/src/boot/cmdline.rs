//! The `aenv.*` words of the kernel command line.

use std::net::Ipv4Addr;

use super::BootError;

/// What the VMM tells the guest. Absent words are `None`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Block device of the image's root; without one the daemon serves from the initramfs.
    pub root: Option<String>,
    /// Address and prefix length of eth0.
    pub address: Option<(Ipv4Addr, u32)>,
    pub gateway: Option<Ipv4Addr>,
    /// Given when the gateway needs no address resolution.
    pub gateway_mac: Option<[u8; 6]>,
    pub dns: Vec<Ipv4Addr>,
    pub hostname: Option<String>,
}

impl Options {
    pub fn parse(text: &str) -> Result<Self, BootError> {
        let mut options = Options::default();
        for word in text.split_whitespace() {
            let Some((key, value)) = word.strip_prefix("aenv.").and_then(|word| word.split_once('=')) else {
                continue;
            };
            match key {
                "root" => options.root = Some(value.into()),
                "ip" => options.address = Some(parse_cidr(value).ok_or_else(|| wrong("aenv.ip", value))?),
                "gw" => options.gateway = Some(value.parse().map_err(|_| wrong("aenv.gw", value))?),
                "gwmac" => options.gateway_mac = Some(parse_mac(value).ok_or_else(|| wrong("aenv.gwmac", value))?),
                "dns" => {
                    let servers = value.split(',').filter(|server| !server.is_empty());
                    let parsed = servers.map(|server| server.parse().map_err(|_| wrong("aenv.dns", value)));
                    options.dns = parsed.collect::<Result<_, _>>()?;
                }
                "hostname" => options.hostname = Some(value.into()),
                // A newer VMM may tell more than this daemon knows.
                _ => {}
            }
        }
        Ok(options)
    }
}

fn wrong(key: &'static str, value: &str) -> BootError {
    BootError::Option {
        key,
        value: value.into(),
    }
}

fn parse_cidr(text: &str) -> Option<(Ipv4Addr, u32)> {
    let (address, prefix) = text.split_once('/')?;
    let prefix = prefix.parse().ok().filter(|prefix| *prefix <= 32)?;
    Some((address.parse().ok()?, prefix))
}

fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let bytes: Vec<u8> = text
        .split(':')
        .map(|byte| u8::from_str_radix(byte, 16))
        .collect::<Result<_, _>>()
        .ok()?;
    bytes.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_the_vmm_are_understood() {
        let text = "console=ttyS0 aenv.root=/dev/vda aenv.ip=10.11.0.2/30 aenv.gw=10.11.0.1 \
                    aenv.gwmac=02:ae:00:00:00:01 aenv.dns=1.1.1.1,8.8.8.8 aenv.hostname=h aenv.new=1 quiet\n";
        let options = Options::parse(text).unwrap();
        assert_eq!(options.root.as_deref(), Some("/dev/vda"));
        assert_eq!(options.address, Some((Ipv4Addr::new(10, 11, 0, 2), 30)));
        assert_eq!(options.gateway_mac, Some([2, 0xae, 0, 0, 0, 1]));
        assert_eq!(options.dns.len(), 2);
        assert_eq!(options.hostname.as_deref(), Some("h"));
    }

    #[test]
    fn a_wrong_value_is_named() {
        for text in [
            "aenv.ip=10.0.0.1",
            "aenv.ip=10.0.0.1/33",
            "aenv.gw=x",
            "aenv.gwmac=02:ae",
            "aenv.dns=1.1.1",
        ] {
            let error = Options::parse(text).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
        assert_eq!(Options::parse("").unwrap(), Options::default());
    }
}
