//! Real redis-server processes for tests and benches: started in milliseconds on free loopback ports, gone when the
//! value is dropped, or when the process that holds it dies.

#![allow(dead_code, reason = "each test binary and bench uses a part of it")]
#![allow(clippy::disallowed_types, reason = "processes start and die in real time, whatever a test does to its clock")]

use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Ports are drawn from here: below the ephemeral ranges of Linux and macOS, as the cluster bus port 10 000 above is.
const PORTS: std::ops::Range<u16> = 11_000..22_000;
const CLUSTER_BUS_OFFSET: u16 = 10_000;
/// How long a server may take until it answers, on a machine that is busy with other things.
const START_MAX: Duration = Duration::from_secs(10);
/// How long one answer may take.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// A redis-server of its own, on a loopback port, with nothing persisted.
pub(crate) struct Server {
    port: u16,
    args: Vec<String>,
    env: Vec<(String, PathBuf)>,
    directory: PathBuf,
    /// A sentinel keeps its state in its configuration file.
    config: Option<PathBuf>,
    process: Mutex<Option<Process>>,
    /// The connection of [`command`](Self::command); made when it is first needed.
    connection: Mutex<Option<Connection>>,
}

struct Process {
    server: Child,
    /// Kills the server when its standard input ends: when this process dies in whatever way, or drops it.
    watchdog: Child,
}

impl Process {
    fn spawn(port: u16, directory: &Path, config: Option<&Path>, args: &[String], env: &[(String, PathBuf)]) -> Self {
        let server = Command::new(binary())
            .args(config)
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
            // In this order: Redis 6.2 makes the file at once.
            .arg("--dir")
            .arg(directory)
            .args(["--logfile", "log"])
            .args(args)
            .envs(env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the server's binary was found");
        let watchdog = Command::new("sh")
            .args(["-c", r#"trap '' INT; read -r _; kill -9 "$0" && rm -rf "$1""#, &server.id().to_string()])
            .arg(directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("there is a shell");
        Self { server, watchdog }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The watchdog first, so that it never kills whoever gets the server's process id next.
        for child in [&mut self.watchdog, &mut self.server] {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Server {
    /// Starts a server and waits until it answers.
    ///
    /// # Panics
    ///
    /// When there is no server to start; the text says how to get one.
    #[must_use]
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts a server with more arguments, such as `["--maxmemory", "1mb"]`. A password given with `--requirepass` is
    /// used by [`command`](Self::command) too.
    ///
    /// # Panics
    ///
    /// When there is no server to start, or it does not start with these arguments; the text has its log.
    #[must_use]
    pub(crate) fn start_with(args: &[&str]) -> Self {
        Self::start_on(None, args, &[])
    }

    /// Starts a server, as [`start_with`](Self::start_with) does, with more environment variables whose values are paths.
    ///
    /// # Panics
    ///
    /// As [`start_with`](Self::start_with) does.
    #[must_use]
    pub(crate) fn start_with_env(args: &[&str], env: &[(&str, &Path)]) -> Self {
        Self::start_on(None, args, env)
    }

    /// Starts a sentinel with these lines of configuration.
    ///
    /// # Panics
    ///
    /// As [`start_with`](Self::start_with) does.
    #[must_use]
    pub(crate) fn start_sentinel(config: &str) -> Self {
        Self::start_on(Some(config), &["--sentinel"], &[])
    }

    fn start_on(config: Option<&str>, args: &[&str], env: &[(&str, &Path)]) -> Self {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let args: Vec<_> = args.iter().map(|arg| (*arg).to_owned()).collect();
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let name = format!("tower-token-bucket-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory).expect("the temporary directory is writable");
        let config = config.map(|lines| {
            let path = directory.join("config");
            std::fs::write(&path, lines).expect("the temporary directory is writable");
            path
        });
        let mut why = String::new();
        // Another process may take the port between the probe and the server's own bind.
        for _ in 0..5 {
            let server = Self {
                port: free_port(),
                args: args.clone(),
                env: env.iter().map(|(name, path)| ((*name).to_owned(), path.to_path_buf())).collect(),
                directory: directory.clone(),
                config: config.clone(),
                process: Mutex::new(None),
                connection: Mutex::new(None),
            };
            match server.launch() {
                Ok(()) => return server,
                Err(error) => why = error,
            }
            std::fs::create_dir_all(&directory).expect("the temporary directory is writable");
        }
        let _ = std::fs::remove_dir_all(&directory);
        panic!("{} {args:?} does not start: {why}", binary().display());
    }

    /// Spawns the process and waits until it answers on the port, or says why it does not.
    fn launch(&self) -> Result<(), String> {
        let config = self.config.as_deref();
        let mut process = Process::spawn(self.port, &self.directory, config, &self.args, &self.env);
        let started = Instant::now();
        loop {
            if let Ok(Some(status)) = process.server.try_wait() {
                let log = std::fs::read_to_string(self.directory.join("log")).unwrap_or_default();
                return Err(format!("{status}\n{log}"));
            }
            // The answer has to be this process's, not that of whoever was quicker to take the port.
            let id = process.server.id().to_string();
            if let Ok(mut connection) = self.try_connect()
                && let Ok(answer) = connection.try_command(&[b"INFO", b"server"])
                && answer.text().is_some_and(|info| field(info, "process_id:") == Some(&id))
            {
                *lock(&self.process) = Some(process);
                *lock(&self.connection) = Some(connection);
                return Ok(());
            }
            if started.elapsed() > START_MAX {
                return Err(format!("no answer on port {} for {START_MAX:?}", self.port));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The port it listens on, at 127.0.0.1; the same after a [`restart`](Self::restart).
    #[must_use]
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// `redis://127.0.0.1:PORT`, with the password if there is one.
    #[must_use]
    pub(crate) fn url(&self) -> String {
        match self.password() {
            Some(password) => format!("redis://:{password}@127.0.0.1:{}", self.port),
            None => format!("redis://127.0.0.1:{}", self.port),
        }
    }

    /// The process id; 0 while it is [killed](Self::kill).
    #[must_use]
    pub(crate) fn pid(&self) -> u32 {
        lock(&self.process).as_ref().map_or(0, |process| process.server.id())
    }

    /// Kills the server with SIGKILL: clients see their connections reset, new ones are refused.
    pub(crate) fn kill(&self) {
        *lock(&self.process) = None;
        *lock(&self.connection) = None;
    }

    /// Kills the server if it still runs, and starts an empty one on the same port with the same arguments.
    ///
    /// # Panics
    ///
    /// When the port does not come free.
    pub(crate) fn restart(&self) {
        self.kill();
        let started = Instant::now();
        while let Err(why) = self.launch() {
            assert!(started.elapsed() < START_MAX, "port {} does not come free: {why}", self.port);
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Stops the process with SIGSTOP: connections stay open, and nobody answers, until it is [thawed](Self::thaw).
    pub(crate) fn freeze(&self) {
        self.signal("STOP");
    }

    /// Lets a [frozen](Self::freeze) process go on; what was sent meanwhile is then carried out.
    pub(crate) fn thaw(&self) {
        self.signal("CONT");
    }

    fn signal(&self, signal: &str) {
        // A shell has `kill` built in; the program of that name is not everywhere.
        let command = format!("kill -{signal} {}", self.pid());
        let status = Command::new("sh").args(["-c", &command]).status().expect("there is a shell");
        assert!(status.success(), "{command}: {status}");
    }

    /// Sends a command on a connection that is kept, and returns the answer: an error of the server is a
    /// [`Value::Error`].
    ///
    /// # Panics
    ///
    /// When the server does not answer.
    pub(crate) fn command(&self, args: &[&str]) -> Value {
        let args: Vec<_> = args.iter().map(|arg| arg.as_bytes()).collect();
        let mut kept = lock(&self.connection);
        let answer = kept.get_or_insert_with(|| self.connect()).try_command(&args);
        answer.unwrap_or_else(|error| {
            *kept = None;
            panic!("no answer from 127.0.0.1:{}: {error}", self.port)
        })
    }

    /// Sends a command, as [`command`](Self::command) does, and returns the answer.
    ///
    /// # Panics
    ///
    /// When the server does not answer, or answers with an error.
    pub(crate) fn query(&self, args: &[&str]) -> Value {
        match self.command(args) {
            Value::Error(error) => panic!("{args:?}: {error}"),
            answer => answer,
        }
    }

    /// Opens a connection of one's own.
    ///
    /// # Panics
    ///
    /// When the server does not answer.
    #[must_use]
    pub(crate) fn connect(&self) -> Connection {
        self.try_connect().unwrap_or_else(|error| panic!("no connection to 127.0.0.1:{}: {error}", self.port))
    }

    fn try_connect(&self) -> std::io::Result<Connection> {
        let mut connection = Connection::open(self.port)?;
        if let Some(password) = self.password() {
            connection.try_command(&[b"AUTH", password.as_bytes()])?;
        }
        Ok(connection)
    }

    fn password(&self) -> Option<&str> {
        let position = self.args.iter().position(|arg| arg == "--requirepass")?;
        self.args.get(position + 1).map(String::as_str)
    }

    /// How often a command was called since the start or the last `CONFIG RESETSTAT`, from scripts too; of a
    /// subcommand, such as `script|load`, likewise.
    pub(crate) fn calls(&self, name: &str) -> u64 {
        let info = self.query(&["INFO", "commandstats"]);
        let stats = field(info.text().unwrap_or_default(), &format!("cmdstat_{}:calls=", name.to_ascii_lowercase()));
        stats.and_then(|stats| stats.split(',').next()?.parse().ok()).unwrap_or(0)
    }

    /// The CPU time that the server's process has used, in system and user mode.
    pub(crate) fn cpu(&self) -> Duration {
        let info = self.query(&["INFO", "cpu"]);
        let seconds = |name| -> f64 {
            field(info.text().unwrap_or_default(), name).and_then(|value| value.parse().ok()).unwrap_or(0.0)
        };
        Duration::from_secs_f64(seconds("used_cpu_sys:") + seconds("used_cpu_user:"))
    }

    /// All keys, sorted.
    pub(crate) fn keys(&self) -> Vec<String> {
        let Value::Array(keys) = self.query(&["KEYS", "*"]) else { return Vec::new() };
        let mut keys: Vec<_> = keys.iter().filter_map(Value::text).map(str::to_owned).collect();
        keys.sort();
        keys
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("port", &self.port).field("args", &self.args).finish_non_exhaustive()
    }
}

/// What a server answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    /// No such thing.
    Nil,
    /// A status, such as `OK`.
    Status(String),
    /// An error, with its code, such as `WRONGTYPE Operation against …`.
    Error(String),
    /// An integer.
    Int(i64),
    /// A string; bytes that are not UTF-8 are replaced.
    Text(String),
    /// An array.
    Array(Vec<Self>),
}

impl Value {
    /// The text of a string or a status.
    #[must_use]
    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) | Self::Status(text) => Some(text),
            Self::Nil | Self::Error(_) | Self::Int(_) | Self::Array(_) => None,
        }
    }

    /// The integer.
    #[must_use]
    pub(crate) fn int(&self) -> Option<i64> {
        match self {
            Self::Int(int) => Some(*int),
            Self::Nil | Self::Status(_) | Self::Error(_) | Self::Text(_) | Self::Array(_) => None,
        }
    }
}

/// A connection that speaks RESP2, one answer for each command in order; commands may be sent ahead of the answers.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: BufReader<TcpStream>,
}

impl Connection {
    /// Connects to a port of 127.0.0.1.
    ///
    /// # Errors
    ///
    /// Those of the socket.
    pub(crate) fn open(port: u16) -> std::io::Result<Self> {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(ANSWER_MAX))?;
        stream.set_write_timeout(Some(ANSWER_MAX))?;
        Ok(Self { stream: BufReader::with_capacity(1 << 16, stream) })
    }

    /// Sends bytes as they are: commands that [`encode`] has written.
    ///
    /// # Errors
    ///
    /// Those of the socket.
    pub(crate) fn send(&mut self, commands: &[u8]) -> std::io::Result<()> {
        self.stream.get_mut().write_all(commands)
    }

    /// Reads one answer.
    ///
    /// # Errors
    ///
    /// Those of the socket; `InvalidData` for what is not RESP2.
    pub(crate) fn receive(&mut self) -> std::io::Result<Value> {
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        let bad = || std::io::Error::new(std::io::ErrorKind::InvalidData, format!("not RESP2: {line:?}"));
        let rest = line.get(1..).and_then(|rest| rest.strip_suffix("\r\n")).ok_or_else(bad)?;
        let int = || rest.parse::<i64>().map_err(|_| bad());
        match line.as_bytes()[0] {
            b'+' => Ok(Value::Status(rest.to_owned())),
            b'-' => Ok(Value::Error(rest.to_owned())),
            b':' => Ok(Value::Int(int()?)),
            b'$' | b'*' if rest.starts_with('-') => Ok(Value::Nil),
            b'$' => {
                let mut text = vec![0; int()? as usize + 2];
                self.stream.read_exact(&mut text)?;
                text.truncate(text.len() - 2);
                Ok(Value::Text(String::from_utf8_lossy(&text).into_owned()))
            }
            b'*' => (0..int()?).map(|_| self.receive()).collect::<Result<_, _>>().map(Value::Array),
            _ => Err(bad()),
        }
    }

    fn try_command(&mut self, args: &[&[u8]]) -> std::io::Result<Value> {
        let mut command = Vec::new();
        encode(&mut command, args);
        self.send(&command)?;
        self.receive()
    }
}

/// Appends a command in RESP to `to`.
pub(crate) fn encode<T: AsRef<[u8]>>(to: &mut Vec<u8>, args: &[T]) {
    to.extend_from_slice(format!("*{}\r\n", args.len()).as_bytes());
    for arg in args {
        let arg = arg.as_ref();
        to.extend_from_slice(format!("${}\r\n", arg.len()).as_bytes());
        to.extend_from_slice(arg);
        to.extend_from_slice(b"\r\n");
    }
}

/// The server's binary: `REDIS_SERVER` if it is set, else `redis-server`, else `valkey-server`.
///
/// # Panics
///
/// When there is none; the text says how to get one. Tests are never skipped for want of a server.
#[must_use]
pub(crate) fn binary() -> PathBuf {
    let runs = |path: &Path| {
        let version = Command::new(path).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        version.is_ok_and(|status| status.success())
    };
    static FOUND: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    FOUND
        .get_or_init(|| {
            if let Some(path) = std::env::var_os("REDIS_SERVER").map(PathBuf::from) {
                assert!(runs(&path), "REDIS_SERVER={} does not run: name a redis-server or unset it", path.display());
                return path;
            }
            let found = ["redis-server", "valkey-server"].into_iter().map(PathBuf::from).find(|path| runs(path));
            found.expect(
                "these tests need a redis-server: `bash tests/run` installs one, as `apt-get install redis-server` and \
                 `brew install redis` do; REDIS_SERVER=/path/to/server names one that is not on the PATH",
            )
        })
        .clone()
}

/// The version of [`binary`], such as (7, 0).
///
/// # Panics
///
/// When it does not say one.
pub(crate) fn version() -> (u32, u32) {
    static SAID: std::sync::OnceLock<(u32, u32)> = std::sync::OnceLock::new();
    *SAID.get_or_init(|| {
        let said = Command::new(binary()).arg("--version").output().expect("it runs").stdout;
        let said = String::from_utf8_lossy(&said);
        let numbers = said.split_once(" v=").map_or("", |(_, version)| version).split('.');
        let numbers: Vec<_> = numbers.map_while(|number| number.parse().ok()).collect();
        let [major, minor, ..] = numbers[..] else { panic!("no version: {said}") };
        (major, minor)
    })
}

/// A port that is free, with its cluster bus port, at this moment.
pub(crate) fn free_port() -> u16 {
    let binds = |port: u16| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
    loop {
        let random = RandomState::new().hash_one(std::process::id());
        let port = PORTS.start + (random % PORTS.len() as u64) as u16;
        if binds(port) && binds(port + CLUSTER_BUS_OFFSET) {
            return port;
        }
    }
}

/// The rest of the line of an INFO answer that starts with `name`.
fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(name))
}

/// A panic of another test leaves nothing half-done here.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
