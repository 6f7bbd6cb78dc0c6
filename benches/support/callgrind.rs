//! What callgrind has counted, read from what it writes.

/// Instructions and allocations.
#[derive(Clone, Copy)]
pub(crate) struct Counts {
    pub(crate) instructions: f64,
    pub(crate) allocations: f64,
}

impl Counts {
    /// Reads a file of callgrind's. A function is named once, with a number that stands for it afterwards; calls follow the
    /// one that is called.
    pub(crate) fn read(written: &str) -> Option<Self> {
        let instructions = written.lines().find_map(|line| line.strip_prefix("totals: "))?.trim().parse().ok()?;
        let (mut allocators, mut called, mut allocations) = (Vec::new(), "", 0.0);
        for line in written.lines() {
            let callee = line.strip_prefix("cfn=");
            if let Some(function) = callee.or_else(|| line.strip_prefix("fn=")) {
                let (number, name) = function.split_once(' ').unwrap_or((function, ""));
                if ["malloc", "calloc", "realloc", "posix_memalign"].contains(&name) {
                    allocators.push(number);
                }
                called = callee.map_or(called, |_| number);
            } else if let Some(calls) = line.strip_prefix("calls=")
                && allocators.contains(&called)
            {
                allocations += calls.split(' ').next()?.parse::<f64>().ok()?;
            }
        }
        Some(Self { instructions, allocations })
    }

    /// For one of so many, by two runs of which the second does twice as many.
    pub(crate) fn each(once: Self, twice: Self, of: usize) -> Self {
        let each = |once: f64, twice: f64| (twice - once) / of as f64;
        Self {
            instructions: each(once.instructions, twice.instructions),
            allocations: each(once.allocations, twice.allocations),
        }
    }
}
