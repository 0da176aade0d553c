//! What was found, as tables for people and JSON for programs.

use std::fmt;

use serde::Serialize;

use crate::difference::Difference;

/// Whether something is as it should be.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Check {
    /// What was checked.
    pub(crate) name: &'static str,
    /// Whether it is as it should be.
    pub(crate) pass: bool,
    /// What was found.
    pub(crate) detail: String,
}

/// A comparison of all parameters with those of one process.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Comparison {
    /// What was compared.
    #[serde(skip)]
    pub(crate) title: String,
    /// The largest relative difference that passes.
    pub(crate) tolerance: f64,
    /// What was found for each parameter.
    pub(crate) differences: Vec<Difference>,
}

/// Everything that was found.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) world_size: usize,
    pub(crate) device: &'static str,
    pub(crate) gradients: Comparison,
    pub(crate) accumulated_gradients: Comparison,
    pub(crate) parameters: Comparison,
    pub(crate) checks: Vec<Check>,
    pub(crate) setup_seconds: f64,
    pub(crate) passed: bool,
}

impl Comparison {
    fn passes(&self, difference: &Difference) -> bool {
        difference.max_relative <= self.tolerance
    }

    /// All of it as one check.
    pub(crate) fn check(&self, name: &'static str) -> Check {
        let worst = self
            .differences
            .iter()
            .max_by(|a, b| a.max_relative.total_cmp(&b.max_relative));
        Check {
            name,
            pass: self.differences.iter().all(|d| self.passes(d)),
            detail: match worst {
                Some(worst) => format!(
                    "largest relative difference {:.1e} (`{}`), tolerance {:.0e}",
                    worst.max_relative, worst.parameter, self.tolerance
                ),
                None => "there is nothing to compare".to_owned(),
            },
        }
    }
}

impl Report {
    /// Number of checks that failed.
    pub(crate) fn failures(&self) -> usize {
        self.checks.iter().filter(|check| !check.pass).count()
    }
}

fn verdict(pass: bool) -> &'static str {
    if pass { "PASS" } else { "FAIL" }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title)?;
        writeln!(
            f,
            "  {:<16}{:<18}{:>10}{:>10}",
            "parameter", "shape", "absolute", "relative"
        )?;
        for difference in &self.differences {
            writeln!(
                f,
                "  {:<16}{:<18}{:>10.1e}{:>10.1e}  {}",
                difference.parameter,
                format!("{:?}", difference.shape),
                difference.max_absolute,
                difference.max_relative,
                verdict(self.passes(difference))
            )?;
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n{}", self.gradients, self.parameters)?;
        for check in &self.checks {
            let verdict = verdict(check.pass);
            writeln!(f, "{verdict}  {:<20}{}", check.name, check.detail)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn comparison(relative: &[f64]) -> Comparison {
        let difference = |&max_relative: &f64| Difference {
            parameter: format!("layer{max_relative}"),
            shape: vec![2, 3],
            max_absolute: max_relative / 2.0,
            max_relative,
        };
        Comparison {
            title: "gradients".to_owned(),
            tolerance: 1e-5,
            differences: relative.iter().map(difference).collect(),
        }
    }

    #[test]
    fn one_difference_beyond_tolerance_fails() {
        assert!(comparison(&[1e-7, 9e-6]).check("gradients").pass);
        let failed = comparison(&[1e-7, 0.25, 1e-6]).check("gradients");
        assert!(!failed.pass && failed.detail.contains("2.5e-1 (`layer0.25`)"));
        assert!(!comparison(&[f64::INFINITY]).check("gradients").pass);
    }

    #[test]
    fn every_line_has_its_verdict() {
        let text = comparison(&[1e-7, 0.25]).to_string();
        assert!(text.contains("[2, 3]"), "{text}");
        assert!(text.contains("5.0e-8    1.0e-7  PASS"), "{text}");
        assert!(text.contains("1.2e-1    2.5e-1  FAIL"), "{text}");
    }
}
