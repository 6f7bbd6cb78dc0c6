//! What this thread logs.

use std::io;
use std::sync::{Arc, Mutex, Once};

use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::FmtSpan;
use tracing_subscriber::util::SubscriberInitExt;

/// What this thread logs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Captures from INFO until the guard is dropped.
    pub(crate) fn capture() -> (Self, impl Drop) {
        Self::of(LevelFilter::INFO, FmtSpan::NONE)
    }

    /// Captures all that anybody logs, spans too, until the guard is dropped.
    pub(crate) fn capture_all() -> (Self, impl Drop) {
        Self::of(LevelFilter::TRACE, FmtSpan::FULL)
    }

    fn of(level: LevelFilter, spans: FmtSpan) -> (Self, impl Drop) {
        // While there is one subscriber only, `tracing` asks the thread that first comes to a line whether anybody wants
        // it, and that thread may be another test's, which wants nothing. This second one wants nothing either.
        static SECOND: Once = Once::new();
        SECOND.call_once(|| {
            let _ = tracing_subscriber::fmt().with_max_level(LevelFilter::OFF).finish().try_init();
        });
        let log = Self::default();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(level)
            .with_span_events(spans)
            .with_ansi(false)
            .with_writer(log.clone())
            .finish();
        (log, subscriber.set_default())
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.text().lines().map(str::to_owned).collect()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}
