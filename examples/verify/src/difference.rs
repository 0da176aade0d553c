//! How far tensors are from what they should be.

use anyhow::{Context, Result, ensure};
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn_ddp::{ProcessGroup, ReduceOp};
use serde::Serialize;

/// The values of one parameter, or of its gradient.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Values {
    /// Path of the parameter in its module.
    pub(crate) path: String,
    /// Its shape.
    pub(crate) shape: Vec<usize>,
    /// Row-major.
    pub(crate) values: Vec<f32>,
}

/// How far one parameter, or its gradient, is from what it should be.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Difference {
    /// Path of the parameter in its module.
    pub(crate) parameter: String,
    /// Its shape.
    pub(crate) shape: Vec<usize>,
    /// The largest difference of any element, on any rank.
    pub(crate) max_absolute: f64,
    /// The same relative to the largest magnitude among the parameter's expected
    /// elements.
    pub(crate) max_relative: f64,
}

/// The values of all parameters of `module`, in order.
pub(crate) fn parameters<M: Module>(module: &M) -> Result<Vec<Values>> {
    collect(module, None)
}

/// The gradients of all parameters of `module`, in order.
pub(crate) fn gradients<M: Module>(module: &M, grads: &GradientsParams) -> Result<Vec<Values>> {
    collect(module, Some(grads))
}

/// The largest differences of `actual` from `expected` on any rank of `group`.
/// Collective.
pub(crate) fn largest(
    actual: &[Values],
    expected: &[Values],
    group: &ProcessGroup,
) -> Result<Vec<Difference>> {
    ensure!(
        actual.len() == expected.len(),
        "{} tensors instead of {}",
        actual.len(),
        expected.len()
    );
    let mut differences = actual
        .iter()
        .zip(expected)
        .map(|(actual, expected)| difference(actual, expected))
        .collect::<Result<Vec<_>>>()?;
    let mut largest: Vec<f64> = differences
        .iter()
        .flat_map(|d| [d.max_absolute, d.max_relative])
        .collect();
    group.all_reduce(&mut largest, ReduceOp::Max)?;
    for (difference, largest) in differences.iter_mut().zip(largest.chunks_exact(2)) {
        (difference.max_absolute, difference.max_relative) = (largest[0], largest[1]);
    }
    Ok(differences)
}

fn difference(actual: &Values, expected: &Values) -> Result<Difference> {
    ensure!(
        actual.path == expected.path && actual.shape == expected.shape,
        "`{}` {:?} instead of `{}` {:?}",
        actual.path,
        actual.shape,
        expected.path,
        expected.shape
    );
    let largest = |values: &mut dyn Iterator<Item = f64>| {
        // A maximum ignores NaN, which is as far away as anything can be.
        values.fold(0.0f64, |max, x| {
            if x.is_nan() {
                f64::INFINITY
            } else {
                max.max(x)
            }
        })
    };
    let pairs = actual.values.iter().zip(&expected.values);
    let max_absolute = largest(&mut pairs.map(|(a, e)| (f64::from(*a) - f64::from(*e)).abs()));
    let scale = largest(&mut expected.values.iter().map(|e| f64::from(e.abs())));
    let max_relative = if max_absolute == 0.0 {
        0.0
    } else {
        max_absolute / scale
    };
    Ok(Difference {
        parameter: actual.path.clone(),
        shape: actual.shape.clone(),
        max_absolute,
        max_relative,
    })
}

fn collect<M: Module>(module: &M, grads: Option<&GradientsParams>) -> Result<Vec<Values>> {
    let mut collector = Collector {
        path: Vec::new(),
        grads,
        found: Vec::new(),
    };
    module.visit(&mut collector);
    collector.found.into_iter().collect()
}

struct Collector<'a> {
    path: Vec<String>,
    grads: Option<&'a GradientsParams>,
    found: Vec<Result<Values>>,
}

impl Collector<'_> {
    fn read<const D: usize>(&self, param: &Param<Tensor<D>>) -> Result<Values> {
        let path = self.path.join(".");
        let tensor = match self.grads {
            None => param.val(),
            Some(grads) => grads
                .get::<D>(param.id)
                .with_context(|| format!("`{path}` has no gradient"))?,
        };
        let shape = tensor.dims().to_vec();
        let values = tensor
            .try_into_data()
            .with_context(|| format!("can't read `{path}`"))?
            .iter::<f32>()
            .collect();
        Ok(Values {
            path,
            shape,
            values,
        })
    }
}

impl ModuleVisitor for Collector<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let values = self.read(param);
        self.found.push(values);
    }

    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(values: &[f32]) -> Values {
        Values {
            path: "layer.weight".to_owned(),
            shape: vec![values.len()],
            values: values.to_vec(),
        }
    }

    fn compare(actual: &[f32], expected: &[f32]) -> (f64, f64) {
        let group = ProcessGroup::single();
        let largest = largest(&[values(actual)], &[values(expected)], &group).unwrap();
        (largest[0].max_absolute, largest[0].max_relative)
    }

    #[test]
    fn differences_are_relative_to_the_largest_element() {
        assert_eq!(compare(&[1.0, 4.5], &[1.25, 4.0]), (0.5, 0.125));
        assert_eq!(compare(&[0.0, -3.0], &[0.0, -3.0]), (0.0, 0.0));
        assert_eq!(compare(&[0.0, 0.0], &[0.0, 0.0]), (0.0, 0.0));
    }

    #[test]
    fn what_is_not_a_number_differs() {
        assert_eq!(compare(&[f32::NAN, 1.0], &[1.0, 1.0]).0, f64::INFINITY);
        let (absolute, relative) = compare(&[1.0, 1.0], &[0.0, 0.0]);
        assert_eq!((absolute, relative), (1.0, f64::INFINITY));
    }

    #[test]
    fn other_tensors_are_no_difference_but_an_error() {
        let group = ProcessGroup::single();
        assert!(largest(&[], &[values(&[1.0])], &group).is_err());
        let result = largest(&[values(&[1.0])], &[values(&[1.0, 2.0])], &group);
        assert!(result.unwrap_err().to_string().contains("instead of"));
    }
}
