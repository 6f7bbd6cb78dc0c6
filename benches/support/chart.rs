//! Charts as SVG: lines, steps and bars over one horizontal axis, in panels that stand on each other. One file with its own
//! background, in light and dark colours, as the reader's system has them.

#![allow(dead_code, reason = "each bench uses a part of it")]

use std::fmt::{self, Write};
use std::path::Path;
use std::{fs, io};

const WIDTH: f64 = 860.0;
/// Around the panels: for the names of the vertical axes, and at the right for the half of the last number.
const LEFT: f64 = 64.0;
const RIGHT: f64 = 24.0;
/// For the title.
const TOP: f64 = 46.0;
/// Above each panel: for its name and the names of its series.
const HEAD: f64 = 34.0;
/// Below the last: for the numbers and the name of the horizontal axis.
const FOOT: f64 = 50.0;
/// About the width of a letter of the series' names.
const LETTER: f64 = 6.2;

/// Blue, orange, green and grey, which those who see few colours tell apart; for light and dark backgrounds.
const COLOURS: [(&str, &str); 4] =
    [("#0063a8", "#62b1ee"), ("#c24e00", "#ff9a52"), ("#007a56", "#3ccb9c"), ("#8c959f", "#6e7681")];

pub(crate) struct Chart {
    pub(crate) title: String,
    /// What can be seen, for those who cannot.
    pub(crate) description: String,
    pub(crate) x: Axis,
    pub(crate) panels: Vec<Panel>,
}

/// The horizontal axis.
pub(crate) struct Axis {
    name: String,
    from: f64,
    to: f64,
    ticks: Vec<(f64, String)>,
}

impl Axis {
    /// Numbers, with ticks from the first on, so far apart.
    pub(crate) fn numbers(name: &str, from: f64, to: f64, step: f64) -> Self {
        let ticks = steps(from, to, step).map(|at| (at, at.to_string())).collect();
        Self { name: name.to_owned(), from, to, ticks }
    }

    /// Names: that at position 0, 1, 2, …
    pub(crate) fn names(name: &str, names: &[&str]) -> Self {
        let ticks = names.iter().enumerate().map(|(i, name)| (i as f64, (*name).to_owned())).collect();
        Self { name: name.to_owned(), from: -0.5, to: names.len() as f64 - 0.5, ticks }
    }
}

/// Series over one vertical axis, which begins at 0.
pub(crate) struct Panel {
    /// What the vertical axis shows, with its unit.
    pub(crate) name: String,
    pub(crate) height: f64,
    pub(crate) to: f64,
    /// How far apart its ticks are.
    pub(crate) step: f64,
    pub(crate) series: Vec<Series>,
}

pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) form: Form,
    /// Of [`COLOURS`].
    pub(crate) colour: usize,
    pub(crate) points: Vec<(f64, f64)>,
}

#[derive(Clone, Copy)]
pub(crate) enum Form {
    Line,
    /// A dashed line that keeps its height until the next point.
    Steps,
    /// Bars in the middle of their points, so wide.
    Bars(f64),
}

fn steps(from: f64, to: f64, step: f64) -> impl Iterator<Item = f64> {
    (0..).map(move |i| from + step * f64::from(i)).take_while(move |at| *at <= to)
}

/// Text, as XML has it.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|letter| match letter {
            '&' => f.write_str("&amp;"),
            '<' => f.write_str("&lt;"),
            '>' => f.write_str("&gt;"),
            '"' => f.write_str("&quot;"),
            letter => f.write_char(letter),
        })
    }
}

impl Chart {
    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        fs::write(path, self.to_string())
    }

    fn x(&self, at: f64) -> f64 {
        LEFT + (at - self.x.from) / (self.x.to - self.x.from) * (WIDTH - LEFT - RIGHT)
    }

    /// A panel whose upper edge is there.
    fn panel(&self, f: &mut fmt::Formatter<'_>, panel: &Panel, top: f64) -> fmt::Result {
        let (right, bottom) = (WIDTH - RIGHT, top + panel.height);
        let y = |value: f64| bottom - (value / panel.to).clamp(0.0, 1.0) * panel.height;
        writeln!(f, r#"<text class="name" x="{LEFT}" y="{:.0}">{}</text>"#, top - 12.0, Escaped(&panel.name))?;
        for at in steps(0.0, panel.to, panel.step) {
            writeln!(f, r#"<path class="grid" d="M{LEFT} {0:.1}H{right}"/>"#, y(at))?;
            writeln!(f, r#"<text class="tick end" x="{:.0}" y="{:.1}">{at}</text>"#, LEFT - 8.0, y(at) + 4.0)?;
        }
        // From the right to the left, so that the names end where the panel does.
        let mut end = right;
        for series in panel.series.iter().rev() {
            series.draw(f, |at| self.x(at), y)?;
        }
        for series in panel.series.iter().rev() {
            let letters = series.name.chars().count() as f64 * LETTER;
            writeln!(
                f,
                r#"<text class="tick end" x="{end:.0}" y="{:.0}">{}</text>"#,
                top - 12.0,
                Escaped(&series.name)
            )?;
            series.sample(f, end - letters - 30.0, top - 16.0)?;
            end -= letters + 46.0;
        }
        writeln!(f, r#"<path class="axis" d="M{LEFT} {top:.1}V{bottom:.1}H{right}"/>"#)
    }
}

impl Series {
    fn draw(&self, f: &mut fmt::Formatter<'_>, x: impl Fn(f64) -> f64, y: impl Fn(f64) -> f64) -> fmt::Result {
        let class = self.class();
        write!(f, r#"<path class="{class}" d=""#)?;
        let mut last = None;
        for (at, value) in &self.points {
            match (self.form, last) {
                (Form::Bars(_), _) if *value == 0.0 => {}
                (Form::Bars(width), _) => {
                    let (left, right) = (x(at - width / 2.0), x(at + width / 2.0));
                    write!(f, "M{left:.1} {:.1}V{:.1}H{right:.1}V{:.1}Z", y(0.0), y(*value), y(0.0))?;
                }
                (_, None) => write!(f, "M{:.1} {:.1}", x(*at), y(*value))?,
                (Form::Line, Some(_)) => write!(f, "L{:.1} {:.1}", x(*at), y(*value))?,
                (Form::Steps, Some(_)) => write!(f, "H{:.1}V{:.1}", x(*at), y(*value))?,
            }
            last = Some(*value);
        }
        writeln!(f, r#""/>"#)
    }

    /// What it looks like, beside its name.
    fn sample(&self, f: &mut fmt::Formatter<'_>, left: f64, middle: f64) -> fmt::Result {
        let d = match self.form {
            Form::Bars(_) => format!("M{:.0} {:.0}h12v10h-12Z", left + 8.0, middle - 5.0),
            Form::Line | Form::Steps => format!("M{left:.0} {middle:.0}h24"),
        };
        writeln!(f, r#"<path class="{}" d="{d}"/>"#, self.class())
    }

    fn class(&self) -> String {
        let form = match self.form {
            Form::Line => "line",
            Form::Steps => "line steps",
            Form::Bars(_) => "bars",
        };
        format!("{form} c{}", self.colour)
    }
}

impl fmt::Display for Chart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let panels: f64 = self.panels.iter().map(|panel| HEAD + panel.height).sum();
        let (height, bottom) = (TOP + panels + FOOT, TOP + panels);
        let (title, description) = (Escaped(&self.title), Escaped(&self.description));
        write!(
            f,
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" aria-labelledby="title description">
<title id="title">{title}</title>
<desc id="description">{description}</desc>
<style>
text {{ font: 12px system-ui, sans-serif; fill: #1f2328 }}
.title {{ font-size: 16px; font-weight: 600 }}
.name {{ font-weight: 600 }}
.end {{ text-anchor: end }}
.middle {{ text-anchor: middle }}
.back {{ fill: #ffffff; stroke: #d0d7de }}
.grid {{ stroke: #e4e8ec; fill: none }}
.axis {{ stroke: #59636e; fill: none }}
.line {{ fill: none; stroke-width: 2; stroke-linejoin: round }}
.steps {{ stroke-dasharray: 6 4 }}
.bars {{ stroke: none }}
"#
        )?;
        let colour = |f: &mut fmt::Formatter<'_>, i: usize, colour: &str| {
            writeln!(f, ".line.c{i} {{ stroke: {colour} }} .bars.c{i} {{ fill: {colour} }}")
        };
        for (i, (light, _)) in COLOURS.iter().enumerate() {
            colour(f, i, light)?;
        }
        f.write_str(
            "@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.back { fill: #0d1117; stroke: #3d444d }
.grid { stroke: #262c34 }
.axis { stroke: #9198a1 }
",
        )?;
        for (i, (_, dark)) in COLOURS.iter().enumerate() {
            colour(f, i, dark)?;
        }
        writeln!(f, "}}\n</style>")?;
        writeln!(
            f,
            r#"<rect class="back" x="0.5" y="0.5" width="{}" height="{}" rx="6"/>"#,
            WIDTH - 1.0,
            height - 1.0
        )?;
        writeln!(f, r#"<text class="title" x="{LEFT}" y="28">{title}</text>"#)?;
        let mut top = TOP;
        for panel in &self.panels {
            self.panel(f, panel, top + HEAD)?;
            top += HEAD + panel.height;
        }
        for (at, text) in &self.x.ticks {
            let (x, y) = (self.x(*at), bottom + 17.0);
            writeln!(f, r#"<text class="tick middle" x="{x:.1}" y="{y:.0}">{}</text>"#, Escaped(text))?;
        }
        let (middle, below) = ((LEFT + WIDTH - RIGHT) / 2.0, bottom + 38.0);
        writeln!(f, r#"<text class="middle" x="{middle:.0}" y="{below:.0}">{}</text>"#, Escaped(&self.x.name))?;
        writeln!(f, "</svg>")
    }
}
