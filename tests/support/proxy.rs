//! What stands between a store and its server: a proxy whose network fails on command, and a server that says anything.

#![allow(clippy::disallowed_types, reason = "networks fail in real time, whatever a test does to its clock")]

use std::collections::VecDeque;
use std::io;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

/// What the network does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// It works.
    Pass,
    /// Answers arrive so much later.
    Delay(Duration),
    /// Commands arrive, answers wait until the mode changes: a partition that ends before anybody gives up.
    Hold,
    /// Commands arrive, answers are lost; a connection that has lost one is reset when the mode changes.
    Drop,
    /// Connections are accepted, and nothing ever arrives on those that are used in this mode, not even afterwards: a
    /// firewall has forgotten them.
    Silent,
    /// So many bytes of answers arrive on each connection, then it is closed.
    CutAfter(usize),
    /// The same for answers that are numbers, as those of the script are: greetings pass.
    CutNumbers(usize),
    /// Nobody listens; open connections are reset.
    Refuse,
}

/// A proxy in front of a port of 127.0.0.1. Its tasks end with the runtime, or when it is dropped.
#[derive(Debug)]
pub(crate) struct Proxy {
    pub(crate) port: u16,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    upstream: u16,
    mode: watch::Sender<Mode>,
    /// Counts the cuts: connections that were opened before the last one are reset.
    cuts: watch::Sender<u64>,
    connections: AtomicU64,
    sent: AtomicU64,
    answered: AtomicU64,
}

impl Proxy {
    pub(crate) async fn start(upstream: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, crate::server::free_port())).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared {
            upstream,
            mode: watch::Sender::new(Mode::Pass),
            cuts: watch::Sender::new(0),
            connections: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            answered: AtomicU64::new(0),
        });
        let accepting = tokio::spawn(Arc::clone(&shared).accept(listener, port));
        Self { port, shared, accepting }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Changes what the network does. Returns once nobody listens any more, or somebody does again.
    pub(crate) async fn set(&self, mode: Mode) {
        let refused = self.shared.mode.send_replace(mode) == Mode::Refuse;
        if mode == Mode::Refuse {
            self.cut();
        }
        if refused != (mode == Mode::Refuse) {
            while TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).await.is_ok() == (mode == Mode::Refuse) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    }

    /// Resets all connections that are open.
    pub(crate) fn cut(&self) {
        self.shared.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// How many connections were accepted, whatever became of them. Those of [`set`](Self::set) carry nothing, and do not
    /// count.
    pub(crate) fn connections(&self) -> u64 {
        self.shared.connections.load(Relaxed)
    }

    /// How many bytes of commands have come, and how many of answers have been passed on.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        (self.shared.sent.load(Relaxed), self.shared.answered.load(Relaxed))
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.cut();
    }
}

impl Shared {
    fn mode(&self) -> Mode {
        *self.mode.borrow()
    }

    async fn accept(self: Arc<Self>, listener: TcpListener, port: u16) {
        let mut listener = Some(listener);
        let mut modes = self.mode.subscribe();
        loop {
            if *modes.borrow_and_update() == Mode::Refuse {
                listener = None;
                if modes.changed().await.is_err() {
                    return;
                }
                continue;
            }
            let open = match listener.take() {
                Some(open) => open,
                None => match TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await {
                    Ok(open) => open,
                    Err(_) => {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                        continue;
                    }
                },
            };
            tokio::select! {
                accepted = open.accept() => {
                    if let Ok((client, _)) = accepted {
                        tokio::spawn(Arc::clone(&self).connection(client));
                    }
                }
                _ = modes.changed() => {}
            }
            listener = Some(open);
        }
    }

    async fn connection(self: Arc<Self>, client: TcpStream) {
        let mut cuts = self.cuts.subscribe();
        // Those that say nothing are not anybody's.
        tokio::select! {
            _ = client.readable() => {}
            _ = cuts.changed() => return,
        }
        if matches!(client.peek(&mut [0]).await, Ok(0) | Err(_)) {
            return;
        }
        self.connections.fetch_add(1, Relaxed);
        let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, self.upstream)).await else { return };
        let _ = (client.set_nodelay(true), server.set_nodelay(true));
        let (client_reads, client_writes) = client.into_split();
        let (server_reads, server_writes) = server.into_split();
        let silent = watch::Sender::new(false);
        let (to_deliver, deliveries) = mpsc::unbounded_channel();
        let reset = tokio::select! {
            _ = self.commands(client_reads, server_writes, &silent) => false,
            () = self.answers(server_reads, to_deliver, &silent) => false,
            reset = self.deliver(deliveries, &client_writes) => reset,
            _ = cuts.changed() => true,
        };
        if reset {
            let _ = client_writes.as_ref().set_zero_linger();
        }
    }

    async fn commands(
        &self,
        mut from: OwnedReadHalf,
        mut to: OwnedWriteHalf,
        silent: &watch::Sender<bool>,
    ) -> io::Result<()> {
        let mut buffer = vec![0; 1 << 16];
        loop {
            let length = from.read(&mut buffer).await?;
            if length == 0 {
                return Ok(());
            }
            self.sent.fetch_add(length as u64, Relaxed);
            if self.mode() == Mode::Silent {
                silent.send_replace(true);
            }
            if !*silent.borrow() {
                to.write_all(&buffer[..length]).await?;
            }
        }
    }

    async fn answers(
        &self,
        mut from: OwnedReadHalf,
        to: mpsc::UnboundedSender<(Instant, Vec<u8>)>,
        silent: &watch::Sender<bool>,
    ) {
        let mut buffer = vec![0; 1 << 16];
        loop {
            let length = match from.read(&mut buffer).await {
                Ok(length) if length > 0 => length,
                // The server is gone; the client does not hear of it where nothing arrives.
                _ if *silent.borrow() => std::future::pending().await,
                _ => return,
            };
            if *silent.borrow() {
                continue;
            }
            let _ = to.send((Instant::now(), buffer[..length].to_vec()));
        }
    }

    /// Whether the connection is to be reset.
    async fn deliver(&self, mut deliveries: mpsc::UnboundedReceiver<(Instant, Vec<u8>)>, to: &OwnedWriteHalf) -> bool {
        let mut modes = self.mode.subscribe();
        // Of this connection, in the present mode.
        let mut delivered = 0;
        'answers: while let Some((came, answer)) = deliveries.recv().await {
            loop {
                if modes.has_changed().unwrap_or(false) {
                    delivered = 0;
                }
                let mode = *modes.borrow_and_update();
                let (mut part, mut cut) = (&answer[..], false);
                match mode {
                    Mode::Pass | Mode::Refuse => {}
                    Mode::Silent => continue 'answers,
                    Mode::Delay(delay) => tokio::time::sleep_until((came + delay).into()).await,
                    Mode::Hold => {
                        let _ = modes.changed().await;
                        continue;
                    }
                    Mode::Drop => {
                        let _ = modes.changed().await;
                        return true;
                    }
                    Mode::CutAfter(most) => {
                        part = &part[..part.len().min(most - delivered)];
                        cut = delivered + part.len() >= most;
                    }
                    Mode::CutNumbers(most) => {
                        cut = part.starts_with(b":");
                        part = if cut { &part[..part.len().min(most)] } else { part };
                    }
                }
                delivered += part.len();
                self.answered.fetch_add(part.len() as u64, Relaxed);
                if write_all(to, part).await.is_err() {
                    return false;
                }
                if cut {
                    return false;
                }
                break;
            }
        }
        false
    }
}

async fn write_all(to: &OwnedWriteHalf, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        to.writable().await?;
        match to.try_write(bytes) {
            Ok(length) => bytes = &bytes[length..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A server that answers each command with what a test tells it to.
#[derive(Debug)]
pub(crate) struct Fake {
    port: u16,
    state: Arc<Mutex<State>>,
    /// Counts the cuts.
    cuts: watch::Sender<u64>,
    accepting: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct State {
    hello: Vec<u8>,
    script: Vec<u8>,
    connections: u64,
    /// The names of the last commands.
    commands: VecDeque<String>,
}

impl Fake {
    /// One that greets as a server does, and answers scripts with `script`.
    pub(crate) async fn start(script: impl Into<Vec<u8>>) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = State { hello: b"%1\r\n$5\r\nproto\r\n:3\r\n".to_vec(), script: script.into(), ..State::default() };
        let state = Arc::new(Mutex::new(state));
        let served = Arc::clone(&state);
        let cuts = watch::Sender::new(0);
        let cutting = cuts.clone();
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                served.lock().unwrap().connections += 1;
                let (served, mut cuts) = (Arc::clone(&served), cutting.subscribe());
                tokio::spawn(async move {
                    tokio::select! {
                        _ = Self::serve(client, served) => {}
                        _ = cuts.changed() => {}
                    }
                });
            }
        });
        Self { port, state, cuts, accepting }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://:canary-password@127.0.0.1:{}", self.port)
    }

    pub(crate) fn say(&self, script: impl Into<Vec<u8>>) {
        self.state.lock().unwrap().script = script.into();
    }

    pub(crate) fn greet(&self, hello: impl Into<Vec<u8>>) {
        self.state.lock().unwrap().hello = hello.into();
    }

    /// Closes all connections that are open.
    pub(crate) fn cut(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }

    pub(crate) fn connections(&self) -> u64 {
        self.state.lock().unwrap().connections
    }

    /// The names of the commands that came since the last call.
    pub(crate) fn commands(&self) -> Vec<String> {
        self.state.lock().unwrap().commands.drain(..).collect()
    }

    async fn serve(client: TcpStream, state: Arc<Mutex<State>>) -> io::Result<()> {
        client.set_nodelay(true)?;
        let mut client = BufReader::new(client);
        loop {
            let command = command(&mut client).await?;
            let name = String::from_utf8_lossy(&command[0]).to_ascii_uppercase();
            let answer = {
                let mut state = state.lock().unwrap();
                state.commands.push_back(name.clone());
                match name.as_str() {
                    "HELLO" => state.hello.clone(),
                    "EVALSHA" | "EVAL" => state.script.clone(),
                    _ => b"+OK\r\n".to_vec(),
                }
            };
            client.get_mut().write_all(&answer).await?;
        }
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Reads a command: an array of strings.
async fn command(from: &mut BufReader<TcpStream>) -> io::Result<Vec<Vec<u8>>> {
    let mut command = Vec::new();
    for _ in 0..number(from, b'*').await? {
        let mut text = vec![0; number(from, b'$').await? + 2];
        from.read_exact(&mut text).await?;
        text.truncate(text.len() - 2);
        command.push(text);
    }
    if command.is_empty() { Err(io::ErrorKind::InvalidData.into()) } else { Ok(command) }
}

/// The number in a line that starts with `kind`.
async fn number(from: &mut BufReader<TcpStream>, kind: u8) -> io::Result<usize> {
    let mut line = Vec::new();
    from.read_until(b'\n', &mut line).await?;
    let text = line.strip_prefix(&[kind]).and_then(|line| std::str::from_utf8(line).ok());
    text.and_then(|text| text.trim_end().parse().ok()).ok_or_else(|| io::ErrorKind::InvalidData.into())
}
