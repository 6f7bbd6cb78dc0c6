//! Several servers that belong together: a cluster, and a primary with replicas and sentinels.

#![allow(clippy::disallowed_types, reason = "processes start and die in real time, whatever a test does to its clock")]

use std::ops::Range;
use std::time::{Duration, Instant};

use crate::server::{Server, Value, encode};

const SLOTS: u16 = 16_384;
/// The name that sentinels know the primary by.
pub(crate) const MASTER: &str = "buckets";
/// How long servers may take to agree with each other, on a machine that is busy with other things.
const AGREE_MAX: Duration = Duration::from_secs(30);

/// Waits for what servers do by themselves.
#[track_caller]
pub(crate) fn until(what: &str, is: impl Fn() -> bool) {
    let started = Instant::now();
    while !is() {
        assert!(started.elapsed() < AGREE_MAX, "{what}: not within {AGREE_MAX:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The answer on a connection of its own: a server closes those that it has when it becomes a primary, or a replica.
fn ask(server: &Server, args: &[&str]) -> Value {
    let mut command = Vec::new();
    encode(&mut command, args);
    let mut connection = server.connect();
    connection.send(&command).and_then(|()| connection.receive()).unwrap_or(Value::Nil)
}

/// The lines of an answer that is one text.
fn text(server: &Server, args: &[&str]) -> String {
    ask(server, args).text().unwrap_or_default().to_owned()
}

/// The rest of a line of `INFO all` that starts with `name`.
pub(crate) fn info(server: &Server, name: &str) -> String {
    let info = text(server, &["INFO", "ALL"]);
    info.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim().to_owned()
}

/// Primaries that share the slots equally, each with as many replicas.
pub(crate) struct Cluster {
    /// First the primaries, then the first replica of each, then the second, …
    pub(crate) nodes: Vec<Server>,
    pub(crate) primaries: usize,
}

impl Cluster {
    /// Starts a cluster and waits until all of it serves.
    pub(crate) fn start(primaries: usize, replicas: usize) -> Self {
        Self::start_with(primaries, replicas, &[])
    }

    pub(crate) fn start_with(primaries: usize, replicas: usize, args: &[&str]) -> Self {
        let mut all =
            vec!["--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--repl-diskless-sync-delay", "0"];
        all.extend(args);
        let nodes: Vec<_> = (0..primaries * (1 + replicas)).map(|_| Server::start_with(&all)).collect();
        for (i, node) in nodes.iter().enumerate() {
            node.query(&["CLUSTER", "SET-CONFIG-EPOCH", &(i + 1).to_string()]);
            for other in &nodes[..i] {
                node.query(&["CLUSTER", "MEET", "127.0.0.1", &other.port().to_string()]);
            }
        }
        let cluster = Self { nodes, primaries };
        for i in 0..primaries {
            let slots: Vec<_> = cluster.slots(i).map(|slot| slot.to_string()).collect();
            let mut command = vec!["CLUSTER", "ADDSLOTS"];
            command.extend(slots.iter().map(String::as_str));
            cluster.nodes[i].query(&command);
        }
        let known = cluster.nodes.len().to_string();
        let knows =
            |node: &Server| text(node, &["CLUSTER", "INFO"]).contains(&format!("cluster_known_nodes:{known}\r"));
        until("all nodes meet", || cluster.nodes.iter().all(knows));
        for (i, node) in cluster.nodes.iter().enumerate().skip(primaries) {
            node.query(&["CLUSTER", "REPLICATE", &cluster.id(i % primaries)]);
        }
        cluster.settle();
        cluster
    }

    /// Waits until all nodes that run say that the cluster serves, and all replicas are in step.
    pub(crate) fn settle(&self) {
        let running = || self.nodes.iter().filter(|node| node.pid() != 0);
        let serves = |node: &Server| text(node, &["CLUSTER", "INFO"]).contains("cluster_state:ok");
        until("the cluster serves", || running().all(serves));
        until("replicas are in step", || {
            running().all(|node| info(node, "role:") == "master" || info(node, "master_link_status:") == "up")
        });
    }

    /// The slots that a primary starts with.
    pub(crate) fn slots(&self, primary: usize) -> Range<u16> {
        let of = |i: usize| (usize::from(SLOTS) * i / self.primaries) as u16;
        of(primary)..of(primary + 1)
    }

    /// The node id.
    pub(crate) fn id(&self, node: usize) -> String {
        text(&self.nodes[node], &["CLUSTER", "MYID"])
    }

    pub(crate) fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(Server::url).collect()
    }

    /// How often a command was called on all nodes.
    pub(crate) fn calls(&self, name: &str) -> u64 {
        self.nodes.iter().map(|node| node.calls(name)).sum()
    }

    /// How many errors of this code all nodes have given.
    pub(crate) fn errors(&self, code: &str) -> u64 {
        let of = |node: &Server| -> Option<u64> {
            let stats = text(node, &["INFO", "errorstats"]);
            stats.lines().find_map(|line| line.strip_prefix(&format!("errorstat_{code}:count=")))?.trim().parse().ok()
        };
        self.nodes.iter().filter_map(of).sum()
    }

    /// The slot of a key.
    pub(crate) fn slot(&self, key: &str) -> u16 {
        let running = self.nodes.iter().find(|node| node.pid() != 0).expect("one runs");
        running.query(&["CLUSTER", "KEYSLOT", key]).int().expect("a slot") as u16
    }

    /// The primary that has a slot by now, as it says itself.
    pub(crate) fn owner(&self, slot: u16) -> Option<&Server> {
        let has = |node: &&Server| {
            let Value::Array(ranges) = ask(node, &["CLUSTER", "SLOTS"]) else { return false };
            ranges.iter().any(|range| {
                let Value::Array(range) = range else { return false };
                let Value::Array(primary) = &range[2] else { return false };
                let within = range[0].int() <= Some(slot.into()) && Some(i64::from(slot)) <= range[1].int();
                within && primary[1].int() == Some(node.port().into())
            })
        };
        self.nodes.iter().filter(|node| node.pid() != 0).find(has)
    }

    /// Sets where a slot is going from one primary to another, as `redis-cli --cluster reshard` does first.
    pub(crate) fn begin_move(&self, slot: u16, from: usize, to: usize) {
        let slot = slot.to_string();
        self.nodes[to].query(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &self.id(from)]);
        self.nodes[from].query(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &self.id(to)]);
    }

    /// Moves the keys of a slot that is on its way.
    pub(crate) fn move_keys(&self, slot: u16, from: usize, to: usize) {
        let next = || match self.nodes[from].query(&["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), "1"]) {
            Value::Array(keys) => keys.first().and_then(Value::text).map(str::to_owned),
            _ => None,
        };
        while let Some(key) = next() {
            self.move_key(&key, from, to);
        }
    }

    /// Moves one key of a slot that is on its way.
    pub(crate) fn move_key(&self, key: &str, from: usize, to: usize) {
        let port = self.nodes[to].port().to_string();
        self.nodes[from].query(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]);
    }

    /// Moves the keys of a slot that are left, and then the slot.
    pub(crate) fn end_move(&self, slot: u16, from: usize, to: usize) {
        let number = slot.to_string();
        self.move_keys(slot, from, to);
        let id = self.id(to);
        for node in [to, from].into_iter().chain((0..self.primaries).filter(|node| ![to, from].contains(node))) {
            self.nodes[node].query(&["CLUSTER", "SETSLOT", &number, "NODE", &id]);
        }
    }
}

/// The configuration of a sentinel that takes the server on this port for the primary.
pub(crate) fn monitor(primary: u16, lines: &str) -> String {
    format!(
        "sentinel monitor {MASTER} 127.0.0.1 {primary} 2\nsentinel down-after-milliseconds {MASTER} 500\n\
         sentinel failover-timeout {MASTER} 3000\n{lines}\n"
    )
}

/// A primary with replicas, and the sentinels that watch it.
pub(crate) struct Watched {
    /// First the one that starts as the primary.
    pub(crate) servers: Vec<Server>,
    pub(crate) sentinels: Vec<Server>,
}

impl Watched {
    /// Starts one primary, two replicas and three sentinels, and waits until they know each other.
    pub(crate) fn start() -> Self {
        Self::start_with(&[], "")
    }

    /// The same with more arguments for the servers, and more lines for the sentinels.
    pub(crate) fn start_with(args: &[&str], lines: &str) -> Self {
        let mut all = vec!["--repl-diskless-sync-delay", "0", "--repl-timeout", "5"];
        all.extend(args);
        let servers: Vec<_> = (0..3).map(|_| Server::start_with(&all)).collect();
        let primary = servers[0].port().to_string();
        for replica in &servers[1..] {
            replica.query(&["REPLICAOF", "127.0.0.1", &primary]);
        }
        until("replicas are in step", || servers[1..].iter().all(|it| info(it, "master_link_status:") == "up"));
        let config = monitor(servers[0].port(), lines);
        let sentinels: Vec<_> = (0..3).map(|_| Server::start_sentinel(&config)).collect();
        until("sentinels know each other and the replicas", || {
            sentinels.iter().all(|it| {
                info(it, "master0:").contains("status=ok,") && {
                    let line = info(it, "master0:");
                    line.contains("slaves=2") && line.contains("sentinels=3")
                }
            })
        });
        Self { servers, sentinels }
    }

    pub(crate) fn urls(&self) -> Vec<String> {
        self.sentinels.iter().map(Server::url).collect()
    }

    /// The server that is the primary by now, as it says itself.
    pub(crate) fn primary(&self) -> Option<&Server> {
        self.servers.iter().filter(|it| it.pid() != 0).find(|it| info(it, "role:") == "master")
    }
}
