//! The secret that every process of a job knows and nobody else.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::{Error, Result};

/// Size of a secret in bytes.
const SECRET_BYTES: usize = 32;

/// Size of the block that HMAC-SHA256 keys are padded to, in bytes.
const BLOCK_BYTES: usize = 64;

/// Size of an authentication code in bytes.
pub(crate) const CODE_BYTES: usize = 32;

/// A job's secret: 32 random bytes that every process of the job is given, in
/// `BURN_DDP_SECRET`, and that every connection between them proves to know
/// without sending it.
///
/// Its [`Debug`](fmt::Debug) form does not show it.
#[derive(Clone)]
pub struct Secret([u8; SECRET_BYTES]);

impl Secret {
    /// A new secret, from the operating system's random numbers.
    pub fn generate() -> Self {
        Self(rand::random())
    }

    /// The secret written as 64 hexadecimal digits. White space around them is
    /// ignored.
    ///
    /// # Errors
    ///
    /// Usage: it is not that. The text is not repeated in the error.
    pub fn from_hex(text: &str) -> Result<Self> {
        let digits: Option<Vec<u32>> = text.trim().chars().map(|c| c.to_digit(16)).collect();
        let digits = digits.ok_or_else(|| not_a_secret("it has other characters in it"))?;
        if digits.len() != 2 * SECRET_BYTES {
            return Err(not_a_secret(&format!("it has {} digits", digits.len())));
        }
        let mut bytes = [0; SECRET_BYTES];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = (pair[0] << 4 | pair[1]) as u8;
        }
        Ok(Self(bytes))
    }

    /// The secret as 64 hexadecimal digits, as [`from_hex`](Self::from_hex)
    /// reads it.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The secret of a job that has none, which may use the loopback interface
    /// only.
    pub(crate) fn none() -> Self {
        Self([0; SECRET_BYTES])
    }

    /// The authentication code (HMAC-SHA256, RFC 2104) of `parts`, each of
    /// which is bound with its length.
    pub(crate) fn code(&self, parts: &[&[u8]]) -> [u8; CODE_BYTES] {
        self.mac(parts).finalize().into_bytes().into()
    }

    /// Whether `code` is the authentication code of `parts`; takes the same
    /// time whatever differs.
    pub(crate) fn verify(&self, parts: &[&[u8]], code: &[u8]) -> bool {
        self.mac(parts).verify_slice(code).is_ok()
    }

    fn mac(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        // HMAC pads a short key with zeros to the hash's block, so that this is
        // the code under the 32 bytes; a key of a block's size can't be wrong.
        let mut key = [0; BLOCK_BYTES];
        key[..SECRET_BYTES].copy_from_slice(&self.0);
        let mut mac = Hmac::<Sha256>::new(&key.into());
        for part in parts {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

fn not_a_secret(why: &str) -> Error {
    Error::usage(format!(
        "the secret must be {} hexadecimal digits, but {why}; `openssl rand -hex {SECRET_BYTES}` \
         makes one",
        2 * SECRET_BYTES
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use proptest::prelude::*;

    #[test]
    fn hex_digits_survive_a_round_trip() {
        let secret = Secret::generate();
        let read = Secret::from_hex(&format!(" {}\n", secret.to_hex().to_uppercase())).unwrap();
        assert_eq!(secret.0, read.0);
        assert_ne!(secret.0, Secret::generate().0);
    }

    #[test]
    fn what_is_not_a_secret_is_a_usage_error_that_does_not_show_it() {
        let almost = "ab".repeat(31);
        for text in ["", "0", &almost, &format!("{almost}zz"), &"ab".repeat(33)] {
            let error = Secret::from_hex(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage);
            assert!(error.to_string().contains("openssl rand -hex 32"));
            assert!(!error.to_string().contains("abab"), "{error}");
        }
    }

    #[test]
    fn debug_does_not_show_it() {
        let secret = Secret::generate();
        assert_eq!(format!("{secret:?}"), "Secret(..)");
    }

    #[test]
    fn the_code_is_hmac_sha256() {
        // Computed with Python's hmac module: key of 32 zero bytes, message
        // `(2).to_bytes(8, "little") + b"hi"`.
        let code = Secret::none().code(&[b"hi"]);
        let hex: String = code.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            hex,
            "bdd71b5a5b932df82d72e608473ba2c8e608a13b44fcb21f5248298db25d8bf5"
        );
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in ".{0,80}") {
            let _ = Secret::from_hex(&text);
        }

        #[test]
        fn a_code_binds_every_byte_and_every_boundary(
            bytes in proptest::collection::vec(any::<u8>(), 1..50),
            cut in any::<proptest::sample::Index>(),
            flipped in any::<proptest::sample::Index>(),
        ) {
            let secret = Secret::generate();
            let code = secret.code(&[&bytes, b""]);
            prop_assert!(secret.verify(&[&bytes, b""], &code));
            let cut = cut.index(bytes.len());
            prop_assert!(!secret.verify(&[&bytes[..cut], &bytes[cut..]], &code));
            let mut other = bytes.clone();
            other[flipped.index(bytes.len())] ^= 1;
            prop_assert!(!secret.verify(&[&other, b""], &code));
            prop_assert!(!Secret::generate().verify(&[&bytes, b""], &code));
        }
    }
}
