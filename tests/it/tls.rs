//! TLS to Redis: whom the client trusts, what it says when it does not, and what an application has to bring.
//!
//! The trusted certificates are read from the environment, so each client is a process of its own.

use std::net::{Ipv4Addr, TcpListener};
use std::process::{Command, Stdio};
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tower_token_bucket::{Amount, BucketKey, Charge, LimitName, Quota, RedisError, RedisStore, Store, conformance};

use crate::certificates::Authority;
use crate::server::Server;
use crate::topology::{Cluster, MASTER, until};

/// None of it may take longer: nothing may hang.
const PATIENCE: Duration = Duration::from_secs(5);

async fn ask(store: &RedisStore) -> Result<(), RedisError> {
    let limit = LimitName::try_new("tls").unwrap();
    let charge = Charge::new(limit, BucketKey::global(), Quota::per_hour(100), Amount::Take(1));
    timeout(PATIENCE, store.acquire(&[charge])).await.expect("an answer in time, or an error").map(drop)
}

fn install_provider() {
    rustls::crypto::ring::default_provider().install_default().unwrap();
}

/// One of the clients; by itself it does nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_process() {
    let Ok(job) = std::env::var("TOKEN_BUCKET_TLS") else { return };
    let (what, url) = job.split_once(' ').unwrap();
    let brings_provider = !what.starts_with("unprepared");
    if brings_provider {
        install_provider();
    }
    let store = match what {
        "cluster" => RedisStore::cluster([url]).await,
        "sentinel" => RedisStore::sentinel([url], MASTER).await,
        _ => RedisStore::connect(url).await,
    };
    let store = match store {
        Ok(store) => store,
        Err(error) => {
            println!("result: not connected: {error}");
            return;
        }
    };
    match what {
        "server" | "cluster" | "sentinel" => {
            conformance::check(&store).await;
            println!("result: kept");
        }
        "refused" | "unprepared" => {
            let error = ask(&store).await.expect_err("it fails");
            let shown = format!("{error:?} {store:?} {error}");
            println!("result: {:?}: {shown}", error.kind());
        }
        // The provider comes after the first connection was tried.
        "unprepared-at-first" => {
            let _ = ask(&store).await;
            install_provider();
            let started = Instant::now();
            while ask(&store).await.is_err() {
                assert!(started.elapsed() < PATIENCE, "it connects once there is a provider");
                sleep(Duration::from_millis(10)).await;
            }
            println!("result: healed");
        }
        _ => panic!("{job}"),
    }
}

/// What a client process says that trusts this authority.
fn client(job: &str, authority: &Authority) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["tls::client_process", "--exact", "--nocapture"])
        .env("TOKEN_BUCKET_TLS", job)
        .env("SSL_CERT_FILE", authority.file())
        .env_remove("SSL_CERT_DIR")
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{job}\n{out}\n{err}");
    assert!(!err.contains("panicked"), "{job}\n{out}\n{err}");
    let result = out.lines().find_map(|line| line.split_once("result: ")).unwrap_or_else(|| panic!("{out}\n{err}")).1;
    println!("{}: {result}", job.split(' ').next().unwrap());
    // The logs of the client too.
    assert!(!format!("{out}{err}").contains("canary"), "{out}\n{err}");
    result.to_owned()
}

fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

/// A server that speaks TLS as well, and its URL for that.
fn server(authority: &Authority) -> (Server, String) {
    let port = free_port();
    let mut args = authority.server(port);
    args.extend(["--requirepass", "canary-password"].map(str::to_owned));
    let server = Server::start_with(&args.iter().map(String::as_str).collect::<Vec<_>>());
    (server, format!("rediss://:canary-password@127.0.0.1:{port}"))
}

#[test]
fn a_server_whose_authority_is_trusted_is_used_and_any_other_is_a_clear_error() {
    let authority = Authority::new();
    let (_server, url) = server(&authority);
    assert_eq!(client(&format!("server {url}"), &authority), "kept");

    let unknown = client(&format!("refused {url}"), &Authority::new());
    assert!(unknown.starts_with("Unreachable") && unknown.contains("certificate"), "{unknown}");
    let wrong_password = client(&format!("refused {}", url.replace("canary-password", "canary-wrong")), &authority);
    assert!(wrong_password.starts_with("Configuration") && wrong_password.contains("WRONGPASS"), "{wrong_password}");

    let elsewhere = Authority::of("DNS:elsewhere.example");
    let (_server, url) = self::server(&elsewhere);
    let other_name = client(&format!("refused {url}"), &elsewhere);
    assert!(other_name.starts_with("Unreachable") && other_name.contains("not valid for name"), "{other_name}");
}

#[test]
fn a_client_that_speaks_plain_to_a_port_of_tls_or_tls_to_a_plain_port_is_told_in_time() {
    let authority = Authority::new();
    let (server, url) = server(&authority);
    let plain = client(&format!("refused {}", url.replace("rediss", "redis")), &authority);
    assert!(plain.starts_with("Unreachable"), "{plain}");
    let tls = client(&format!("refused {}", server.url().replace("redis", "rediss")), &authority);
    assert!(tls.starts_with("Unreachable"), "{tls}");
}

/// With `tls-cluster` nodes tell the ports of TLS to those who ask on one.
#[test]
fn a_cluster_is_followed_over_tls() {
    let authority = Authority::new();
    let port = free_port();
    let mut args = authority.server(port);
    args.extend(["--tls-cluster", "yes"].map(str::to_owned));
    let cluster = Cluster::start_with(1, 0, &args.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(client(&format!("cluster rediss://127.0.0.1:{port}"), &authority), "kept");
    assert!(cluster.calls("evalsha") > 0);
}

#[test]
fn a_primary_is_found_over_tls_by_sentinels_that_speak_it() {
    let authority = Authority::new();
    let (ports, lines) = ([free_port(), free_port()], |port| {
        let args = authority.server(port);
        let lines = args.chunks(2).map(|pair| format!("{} {}\n", pair[0].trim_start_matches("--"), pair[1]));
        lines.collect::<String>()
    });
    let server = Server::start_with(&authority.server(ports[0]).iter().map(String::as_str).collect::<Vec<_>>());
    let config =
        format!("{}tls-replication yes\nsentinel monitor {MASTER} 127.0.0.1 {} 1\n", lines(ports[1]), ports[0]);
    let sentinel = Server::start_sentinel(&config);
    until("the sentinel sees the primary", || crate::topology::info(&sentinel, "master0:").contains("status=ok,"));
    assert_eq!(client(&format!("sentinel rediss://127.0.0.1:{}", ports[1]), &authority), "kept");
    assert!(server.calls("evalsha") > 0);
}

/// rustls has no provider of cryptography by itself.
#[test]
fn without_a_provider_of_cryptography_connecting_is_an_error_and_no_panic() {
    let authority = Authority::new();
    let (_server, url) = server(&authority);
    let result = client(&format!("unprepared {url}"), &authority);
    assert!(result.contains("provider"), "{result}");
}

#[test]
fn a_provider_that_is_installed_late_is_found() {
    let authority = Authority::new();
    let (_server, url) = server(&authority);
    let result = client(&format!("unprepared-at-first {url}"), &authority);
    assert!(result == "healed" || result.contains("not connected"), "{result}");
}
