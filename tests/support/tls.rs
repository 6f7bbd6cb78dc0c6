//! A certificate authority, and what it signs, in a directory that is gone with the value.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// An authority of its own, and the certificate of a server that it has signed.
pub(crate) struct Authority {
    directory: PathBuf,
}

impl Authority {
    /// One that vouches for a server at 127.0.0.1.
    ///
    /// # Panics
    ///
    /// When there is no `openssl`.
    pub(crate) fn new() -> Self {
        Self::of("IP:127.0.0.1")
    }

    /// One that vouches for a server of this name, such as `DNS:example.org`.
    pub(crate) fn of(server: &str) -> Self {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let name = format!("token-bucket-tls-{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let authority = Self { directory: std::env::temp_dir().join(&name) };
        fs::create_dir_all(&authority.directory).expect("the temporary directory is writable");
        let extensions = format!("subjectAltName={server}\nbasicConstraints=CA:FALSE\n");
        fs::write(authority.directory.join("extensions"), extensions).expect("the temporary directory is writable");
        let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
        authority.openssl(&format!("req -x509 {key} -days 2 -subj /CN={name} -keyout ca.key -out ca.pem"));
        authority.openssl(&format!("req {key} -subj /CN=server -keyout server.key -out server.csr"));
        let sign = "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2";
        authority.openssl(&format!("{sign} -extfile extensions -out server.pem"));
        authority
    }

    fn openssl(&self, args: &str) {
        let output = Command::new("openssl")
            .args(args.split(' '))
            .current_dir(&self.directory)
            .stdin(Stdio::null())
            .output()
            .expect("the tests of TLS need openssl, as `apt-get install openssl` brings it");
        assert!(output.status.success(), "openssl {args}: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn path(&self, file: &str) -> String {
        self.directory.join(file).to_str().expect("the path is UTF-8").to_owned()
    }

    /// What clients have to trust.
    pub(crate) fn file(&self) -> String {
        self.path("ca.pem")
    }

    /// Arguments of a server that speaks TLS on this port.
    pub(crate) fn server(&self, port: u16) -> Vec<String> {
        let port = port.to_string();
        let (certificate, key, authority) = (self.path("server.pem"), self.path("server.key"), self.file());
        ["--tls-port", &port, "--tls-cert-file", &certificate, "--tls-key-file", &key, "--tls-ca-cert-file", &authority]
            .into_iter()
            .chain(["--tls-auth-clients", "no"])
            .map(str::to_owned)
            .collect()
    }
}

impl Drop for Authority {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}
