//! `trainer report`: the reward curves of one or several runs as an SVG.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::tracking::{Metrics, MetricsError, read_metrics};

/// Mean reward over the held-out prompts.
const HELD_OUT: &str = "eval/reward";
/// Mean reward of a step's rollouts.
const TRAINING: &str = "rollout/raw_reward";

/// In pixels, at which the text sizes below are right.
const SIZE: (u32, u32) = (800, 440);
const INK: RGBColor = RGBColor(0x24, 0x29, 0x2f);
const FAINT: RGBColor = RGBColor(0xdf, 0xe3, 0xe8);
/// One per run, told apart by colour-blind readers too (Okabe and Ito, without the yellow).
const COLORS: [RGBColor; 6] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0x40, 0x40, 0x40),
];

/// Why there is no drawing.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The output's name says something other than SVG.
    #[error("{}: expected a name that ends in .svg", path.display())]
    NotSvg {
        /// The name.
        path: PathBuf,
    },
    /// A run's metrics cannot be read.
    #[error("{} is not a run that can be drawn", run.display())]
    Run {
        /// The run's folder.
        run: PathBuf,
        /// Why.
        #[source]
        source: MetricsError,
    },
    /// The metrics hold no reward.
    #[error(
        "{}: found no `{HELD_OUT}` and no `{TRAINING}`, expected at least one; let the run finish a step",
        path.display()
    )]
    NoReward {
        /// The metrics file.
        path: PathBuf,
    },
    /// The plotting library gave up.
    #[error("cannot draw {}: {message}", path.display())]
    Draw {
        /// The output.
        path: PathBuf,
        /// What it said.
        message: String,
    },
    /// The output cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// One run's points, by step. A step that was repeated after a resume counts once, as it came out last.
struct Curve {
    name: String,
    held_out: BTreeMap<usize, f64>,
    training: BTreeMap<usize, f64>,
}

/// Draws the held-out and training rewards of `runs` (folders) by step into `out`.
///
/// # Errors
/// When a run has no rewards to draw or `out` cannot be written.
pub fn write_report(runs: &[PathBuf], out: &Path) -> Result<(), ReportError> {
    if out.extension().is_none_or(|extension| extension != "svg") {
        return Err(ReportError::NotSvg { path: out.to_owned() });
    }
    let curves = runs.iter().map(|run| read_curve(run)).collect::<Result<Vec<_>, _>>()?;
    let svg = draw(&curves).map_err(|error| ReportError::Draw { path: out.to_owned(), message: error.to_string() })?;
    std::fs::write(out, svg).map_err(|source| ReportError::Write { path: out.to_owned(), source })
}

fn read_curve(run: &Path) -> Result<Curve, ReportError> {
    let path = run.join("metrics.jsonl");
    let lines = read_metrics(&path).map_err(|source| ReportError::Run { run: run.to_owned(), source })?;
    let points = |metric: &str| -> BTreeMap<usize, f64> {
        let value = |(step, metrics): &(usize, Metrics)| {
            metrics.get(metric).filter(|reward| reward.is_finite()).map(|&reward| (*step, reward))
        };
        lines.iter().filter_map(value).collect()
    };
    let name = run.canonicalize().ok().and_then(|run| Some(run.file_name()?.to_string_lossy().into_owned()));
    let curve = Curve {
        name: name.unwrap_or_else(|| run.display().to_string()),
        held_out: points(HELD_OUT),
        training: points(TRAINING),
    };
    if curve.held_out.is_empty() && curve.training.is_empty() {
        return Err(ReportError::NoReward { path });
    }
    Ok(curve)
}

type DrawResult<T> = Result<T, Box<dyn std::error::Error>>;

fn draw(curves: &[Curve]) -> DrawResult<String> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        draw_on(&root, curves).map_err(|error| error.to_string())?;
        root.present().map_err(|error| error.to_string())?;
    }
    Ok(svg)
}

fn draw_on<B: DrawingBackend>(root: &DrawingArea<B, Shift>, curves: &[Curve]) -> DrawResult<()>
where
    B::ErrorType: 'static,
{
    let points = || curves.iter().flat_map(|curve| curve.held_out.iter().chain(&curve.training));
    let last_step = points().map(|(&step, _)| step).max().unwrap_or(0).max(1) as f64;
    let lowest = points().map(|(_, &reward)| reward).fold(0.0, f64::min);
    let highest = points().map(|(_, &reward)| reward).fold(f64::NEG_INFINITY, f64::max);
    let room = if highest > lowest { 0.06 * (highest - lowest) } else { 0.5 };
    let bottom = if lowest < 0.0 { lowest - room } else { 0.0 };
    // Most rewards end at 1: no space above it if it is not reached.
    let top = if highest <= 1.0 { (highest + room).min(1.02) } else { highest + room };

    // Enough to tell the axis' labels apart: two for rewards from 0 to 1.
    let decimals = (1.0 - (top - bottom).log10().floor()).clamp(0.0, 12.0) as usize;

    let font = |size: u32| ("sans-serif", size).into_font().color(&INK);
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(root)
        .margin(16)
        .margin_right(24)
        .x_label_area_size(52)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..last_step * 1.01, bottom..top)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(FAINT)
        .axis_style(INK.mix(0.5))
        .x_labels(8)
        .y_labels(7)
        // Steps are whole; a short run's axis has marks between them.
        .x_label_formatter(&|step| {
            if (step - step.round()).abs() < 1e-6 { format!("{step:.0}") } else { String::new() }
        })
        .y_label_formatter(&|reward| format!("{reward:.decimals$}"))
        .label_style(font(15))
        .axis_desc_style(font(16))
        .x_desc("training step")
        .y_desc("mean reward per response")
        .draw()?;

    for (curve, color) in curves.iter().zip(COLORS.iter().cycle()) {
        let name = |what: &str| format!("{}, {what}", curve.name);
        let line = |points: &BTreeMap<usize, f64>| -> Vec<(f64, f64)> {
            points.iter().map(|(&step, &reward)| (step as f64, reward)).collect()
        };
        if !curve.training.is_empty() {
            let thin = ShapeStyle { color: color.mix(0.45), filled: false, stroke_width: 1 };
            chart
                .draw_series(LineSeries::new(line(&curve.training), thin))?
                .label(name("training"))
                .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 26, y)], thin));
        }
        if !curve.held_out.is_empty() {
            let thick = color.stroke_width(3);
            let dot = color.filled();
            chart.draw_series(LineSeries::new(line(&curve.held_out), thick))?.label(name("held-out")).legend(
                move |(x, y)| {
                    EmptyElement::at((x, y))
                        + PathElement::new(vec![(0, 0), (26, 0)], thick)
                        + Circle::new((13, 0), 4, dot)
                },
            );
            chart.draw_series(line(&curve.held_out).into_iter().map(|at| Circle::new(at, 4, dot)))?;
        }
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .margin(14)
        .legend_area_size(32)
        .label_font(font(15))
        .background_style(WHITE.mix(0.85))
        .border_style(FAINT)
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tracking::{MetricsFile, Tracker};

    fn run(folder: &Path, name: &str, lines: &[(usize, &str, f64)]) -> PathBuf {
        let run = folder.join(name);
        std::fs::create_dir(&run).expect("makes a folder");
        let mut file = MetricsFile::open(&run.join("metrics.jsonl")).expect("opens");
        for &(step, metric, value) in lines {
            file.log(step, &Metrics::from([(metric.to_owned(), value)])).expect("logs");
        }
        run
    }

    #[test]
    fn one_run_and_two() {
        let folder = tempfile::tempdir().expect("a folder");
        let lines =
            [(0, HELD_OUT, 0.1), (1, TRAINING, 0.2), (2, TRAINING, 0.4), (2, TRAINING, 0.3), (2, HELD_OUT, 0.5)];
        let (one, two) = (run(folder.path(), "one", &lines), run(folder.path(), "t<o", &lines));
        let out = folder.path().join("curve.svg");
        let draw = |runs: &[PathBuf]| {
            write_report(runs, &out).unwrap_or_else(|error| panic!("{error}"));
            std::fs::read_to_string(&out).expect("reads")
        };
        let svg = draw(std::slice::from_ref(&one));
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        // Two held-out points and the one in the legend.
        assert_eq!(svg.matches("<circle").count(), 3);
        let svg = draw(&[one, two]);
        assert_eq!(svg.matches("<circle").count(), 6);
        assert!(svg.contains("one, held-out") && svg.contains("t&lt;o, training"));
    }

    #[test]
    fn odd_values_are_drawn() {
        let folder = tempfile::tempdir().expect("a folder");
        let out = folder.path().join("curve.svg");
        let cases: [&[(usize, &str, f64)]; 4] = [
            &[(0, HELD_OUT, 0.0)],
            &[(0, HELD_OUT, -3.0), (1, HELD_OUT, 250.0)],
            &[(5, TRAINING, 1.0), (6, TRAINING, f64::NAN)],
            &[(1, TRAINING, 1e-9), (2, TRAINING, 3e-9)],
        ];
        for (idx, lines) in cases.into_iter().enumerate() {
            let run = run(folder.path(), &idx.to_string(), lines);
            write_report(&[run], &out).unwrap_or_else(|error| panic!("case {idx}: {error}"));
        }
    }

    #[test]
    fn what_cannot_be_drawn() {
        let folder = tempfile::tempdir().expect("a folder");
        let empty = run(folder.path(), "empty", &[]);
        let good = run(folder.path(), "good", &[(0, HELD_OUT, 0.5)]);
        let error = |run: &Path, out: &str| {
            let error = write_report(&[run.to_owned()], &folder.path().join(out)).expect_err("fails");
            format!("{:#}", anyhow::Error::new(error)).replace(&*folder.path().to_string_lossy(), "runs")
        };
        insta::assert_snapshot!(error(&good, "curve.png"), @"runs/curve.png: expected a name that ends in .svg");
        insta::assert_snapshot!(
            error(&empty, "curve.svg"),
            @"runs/empty/metrics.jsonl: found no `eval/reward` and no `rollout/raw_reward`, expected at least one; let the run finish a step"
        );
        insta::assert_snapshot!(
            error(&folder.path().join("gone"), "curve.svg"),
            @"runs/gone is not a run that can be drawn: cannot open runs/gone/metrics.jsonl: No such file or directory (os error 2)"
        );
        insta::assert_snapshot!(
            error(&good, "no/folder/curve.svg"),
            @"cannot write runs/no/folder/curve.svg: No such file or directory (os error 2)"
        );
    }
}
