//! Compares tensors and gradients.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

/// The values of one tensor, under the path of its parameter.
pub(crate) type Named = (String, Option<Vec<f32>>);

struct Collector<'a> {
    path: Vec<String>,
    grads: Option<&'a GradientsParams>,
    found: Vec<Named>,
}

impl ModuleVisitor for Collector<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = match self.grads {
            Some(grads) => grads.get::<D>(param.id),
            None => Some(param.val()),
        };
        let values = tensor.map(|t| t.into_data().try_into_vec::<f32>().expect("f32"));
        self.found.push((self.path.join("."), values));
    }

    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }
}

fn collect<M: Module>(module: &M, grads: Option<&GradientsParams>) -> Vec<Named> {
    let mut collector = Collector {
        path: Vec::new(),
        grads,
        found: Vec::new(),
    };
    module.visit(&mut collector);
    collector.found
}

/// The gradient of every parameter of `module`.
pub(crate) fn gradients<M: Module>(module: &M, grads: &GradientsParams) -> Vec<Named> {
    collect(module, Some(grads))
}

/// The value of every parameter of `module`.
pub(crate) fn values<M: Module>(module: &M) -> Vec<Named> {
    collect(module, None)
}

/// Fails unless every tensor is within `tolerance` of the expected one, relative
/// to the largest of its values.
pub(crate) fn assert_close(actual: &[Named], expected: &[Named], tolerance: f32) {
    assert_eq!(actual.len(), expected.len());
    for ((path, actual), (expected_path, expected)) in actual.iter().zip(expected) {
        assert_eq!(path, expected_path);
        let (actual, expected) = match (actual, expected) {
            (None, None) => continue,
            (Some(actual), Some(expected)) => (actual, expected),
            _ => panic!("{path}: {actual:?} instead of {expected:?}"),
        };
        assert_eq!(actual.len(), expected.len(), "{path}");
        let scale = expected
            .iter()
            .fold(f32::MIN_POSITIVE, |m, x| m.max(x.abs()));
        for (a, e) in actual.iter().zip(expected) {
            assert!(
                (a - e).abs() <= tolerance * scale,
                "{path}: {a} instead of {e}, and the largest is {scale}"
            );
        }
    }
}
