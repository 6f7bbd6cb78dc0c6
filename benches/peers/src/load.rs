//! A client that loads a server over HTTP/1.1: so many connections, each with one request on the wire at a time.
//!
//! By hand, against the example server (its limits have to let it through: with the ones of `examples/api.toml` nearly all
//! is refused after a moment, which is worth measuring too):
//!
//! ```text
//! cargo run --release --example api &
//! cd benches/peers && cargo run --release --bin load -- http://127.0.0.1:3000/search --connections 32 --seconds 10
//! … --key-header x-api-key --keys 1000 --key-prefix client-
//! ```

use std::collections::BTreeMap;
use std::io::{self, Error, ErrorKind};
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// What is sent, and for how long.
#[derive(Clone)]
pub(crate) struct Plan {
    pub(crate) to: SocketAddr,
    /// Whole requests; each connection sends them in turn, from a place of its own on.
    pub(crate) requests: Arc<[Vec<u8>]>,
    pub(crate) connections: usize,
    pub(crate) until: Until,
}

#[derive(Clone, Copy)]
pub(crate) enum Until {
    Time(Duration),
    /// Requests of each connection.
    Requests(usize),
}

#[derive(Default)]
pub(crate) struct Outcome {
    pub(crate) elapsed: Duration,
    /// Nanoseconds, sorted.
    pub(crate) latencies: Vec<u64>,
    pub(crate) statuses: BTreeMap<u16, usize>,
}

impl Outcome {
    pub(crate) fn per_second(&self) -> f64 {
        self.latencies.len() as f64 / self.elapsed.as_secs_f64()
    }

    /// Microseconds within which this share was answered.
    pub(crate) fn percentile(&self, share: f64) -> f64 {
        let at = (self.latencies.len() as f64 * share) as usize;
        let at = at.min(self.latencies.len().saturating_sub(1));
        self.latencies.get(at).map_or(f64::NAN, |nanos| *nanos as f64 / 1e3)
    }
}

/// A GET for each key, or one without where there are none.
pub(crate) fn requests(host: &str, path: &str, header: &str, keys: &[String]) -> Arc<[Vec<u8>]> {
    let request = |fields: String| format!("GET {path} HTTP/1.1\r\nhost: {host}\r\n{fields}\r\n").into_bytes();
    if keys.is_empty() {
        return [request(String::new())].into();
    }
    keys.iter().map(|key| request(format!("{header}: {key}\r\n"))).collect()
}

/// Sends until the plan is done. Fails where a connection does: a server that closes connections is not measured.
pub(crate) async fn drive(plan: &Plan) -> io::Result<Outcome> {
    let mut streams = Vec::new();
    for _ in 0..plan.connections {
        let stream = TcpStream::connect(plan.to).await?;
        stream.set_nodelay(true)?;
        streams.push(stream);
    }
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    for (i, stream) in streams.into_iter().enumerate() {
        let first = i * plan.requests.len() / plan.connections;
        tasks.spawn(connection(stream, plan.clone(), first, started));
    }
    let mut outcome = Outcome::default();
    while let Some(done) = tasks.join_next().await {
        let (latencies, statuses) = done.map_err(Error::other)??;
        outcome.latencies.extend(latencies);
        statuses.into_iter().for_each(|(status, times)| *outcome.statuses.entry(status).or_default() += times);
    }
    outcome.elapsed = started.elapsed();
    outcome.latencies.sort_unstable();
    Ok(outcome)
}

type Answers = (Vec<u64>, BTreeMap<u16, usize>);

async fn connection(mut stream: TcpStream, plan: Plan, first: usize, started: Instant) -> io::Result<Answers> {
    let (mut latencies, mut statuses, mut buffer) = (Vec::new(), BTreeMap::new(), Vec::with_capacity(1 << 14));
    let mut requests = plan.requests.iter().cycle().skip(first);
    loop {
        let done = match plan.until {
            Until::Time(time) => started.elapsed() >= time,
            Until::Requests(requests) => latencies.len() >= requests,
        };
        let (false, Some(request)) = (done, requests.next()) else { return Ok((latencies, statuses)) };
        let sent = Instant::now();
        stream.write_all(request).await?;
        let status = answer(&mut stream, &mut buffer).await?;
        latencies.push(sent.elapsed().as_nanos() as u64);
        *statuses.entry(status).or_default() += 1;
    }
}

/// Reads one whole answer, and returns its status.
async fn answer(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> io::Result<u16> {
    buffer.clear();
    loop {
        if let Some(end) = buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            let head = std::str::from_utf8(&buffer[..end]).map_err(Error::other)?;
            let status = head.get(9..12).and_then(|status| status.parse().ok());
            let length = head.lines().find_map(|line| {
                let (name, value) = line.split_once(':')?;
                name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
            });
            let (Some(status), Some(length)) = (status, length) else {
                return Err(Error::new(ErrorKind::InvalidData, format!("no status or no length: {head}")));
            };
            if buffer.len() >= end + 4 + length {
                return Ok(status);
            }
        }
        if stream.read_buf(buffer).await? == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
    }
}

const USAGE: &str =
    "load URL [--connections 32] [--seconds 10] [--key-header NAME] [--keys 1000] [--key-prefix client-]";

/// Settings from the command line.
fn arguments() -> Option<(String, Plan)> {
    let mut url = None;
    let (mut connections, mut seconds, mut header, mut keys) = (32, 10.0, String::new(), 1_000);
    let mut prefix = "client-".to_owned();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        if let Some(rest) = argument.strip_prefix("http://") {
            url = Some(rest.to_owned());
            continue;
        }
        let value = arguments.next()?;
        match argument.as_str() {
            "--connections" => connections = value.parse().ok().filter(|connections| *connections > 0)?,
            "--seconds" => seconds = value.parse().ok().filter(|seconds: &f64| *seconds > 0.0 && *seconds < 1e6)?,
            "--key-header" => header = value,
            "--keys" => keys = value.parse().ok()?,
            "--key-prefix" => prefix = value,
            _ => return None,
        }
    }
    let url = url?;
    let (host, path) = url.split_once('/').unwrap_or((&url, ""));
    let keys: Vec<_> = (0..if header.is_empty() { 0 } else { keys }).map(|i| format!("{prefix}{i}")).collect();
    let plan = Plan {
        to: host.to_socket_addrs().ok()?.next()?,
        requests: requests(host, &format!("/{path}"), &header, &keys),
        connections,
        until: Until::Time(Duration::from_secs_f64(seconds)),
    };
    Some((host.to_owned(), plan))
}

/// The program.
pub fn main() {
    let Some((host, plan)) = arguments() else {
        eprintln!("usage: {USAGE}");
        std::process::exit(2);
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    match runtime.block_on(drive(&plan)) {
        Ok(outcome) => {
            let [p50, p99, p999] = [0.5, 0.99, 0.999].map(|share| outcome.percentile(share));
            println!("{:.0} req/s to {host} on {} connections", outcome.per_second(), plan.connections);
            println!("p50 {p50:.0} us, p99 {p99:.0} us, p999 {p999:.0} us");
            outcome.statuses.iter().for_each(|(status, times)| println!("{status}: {times}"));
        }
        Err(error) => {
            eprintln!("{host}: {error}");
            std::process::exit(1);
        }
    }
}
