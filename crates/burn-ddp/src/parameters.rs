//! What a module's parameters are: the list that every rank must agree on.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Bool, DType, Int, Tensor};
use serde::{Deserialize, Serialize};

use crate::{Error, ProcessGroup, Result};

/// One tensor of a module, in module traversal order.
///
/// The order and everything here but `id` must be the same on every rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Parameter {
    /// Path in the module, such as `encoder.0.weight`.
    pub(crate) path: String,
    pub(crate) kind: Kind,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
    /// Whether it gets a gradient.
    pub(crate) trainable: bool,
    /// Burn's `ParamId`, which each process draws at random.
    pub(crate) id: u64,
}

/// The kind of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    Float,
    Int,
    Bool,
}

impl Parameter {
    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Everything but the id, for people.
    fn describe(&self) -> String {
        let trainable = if self.trainable { "" } else { ", frozen" };
        format!(
            "`{}` ({:?} {:?} {:?}{trainable})",
            self.path, self.kind, self.dtype, self.shape
        )
    }

    fn same_as(&self, other: &Self) -> bool {
        let Self {
            path,
            kind,
            shape,
            dtype,
            trainable,
            id: _,
        } = self;
        *path == other.path
            && *kind == other.kind
            && *shape == other.shape
            && *dtype == other.dtype
            && *trainable == other.trainable
    }
}

/// Lists the tensors of `module` in traversal order.
pub(crate) fn list<M: Module>(module: &M) -> Vec<Parameter> {
    let mut lister = Lister::default();
    module.visit(&mut lister);
    lister.parameters
}

#[derive(Default)]
struct Lister {
    path: Vec<String>,
    parameters: Vec<Parameter>,
}

impl Lister {
    fn push(&mut self, kind: Kind, shape: Vec<usize>, dtype: DType, trainable: bool, id: u64) {
        self.parameters.push(Parameter {
            path: self.path.join("."),
            kind,
            shape,
            dtype,
            trainable,
            id,
        });
    }
}

impl ModuleVisitor for Lister {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.base();
        self.push(
            Kind::Float,
            tensor.dims().to_vec(),
            tensor.dtype(),
            tensor.is_require_grad(),
            param.id.val(),
        );
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let tensor = param.base();
        self.push(
            Kind::Int,
            tensor.dims().to_vec(),
            tensor.dtype(),
            false,
            param.id.val(),
        );
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        let tensor = param.base();
        self.push(
            Kind::Bool,
            tensor.dims().to_vec(),
            tensor.dtype(),
            false,
            param.id.val(),
        );
    }

    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }
}

/// Whether some parameter of `module` gets a gradient.
pub(crate) fn any_trainable<M: Module>(module: &M) -> bool {
    struct Any(bool);
    impl ModuleVisitor for Any {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0 |= param.is_require_grad();
        }
    }
    let mut any = Any(false);
    module.visit(&mut any);
    any.0
}

/// Checks that no two trainable parameters share one id.
///
/// # Errors
///
/// A usage error naming both paths. Gradients and optimizer state are keyed by
/// id, so that Burn would train one and forget the other.
pub(crate) fn check_distinct(parameters: &[Parameter]) -> Result<()> {
    let mut seen = std::collections::HashMap::new();
    for parameter in parameters.iter().filter(|p| p.trainable) {
        if let Some(first) = seen.insert(parameter.id, parameter) {
            return Err(Error::usage(format!(
                "the trainable parameters `{}` and `{}` share one ParamId, so only one of them \
                 would be trained: build them separately, or freeze the copy with `no_grad()`",
                first.path, parameter.path
            )));
        }
    }
    Ok(())
}

/// Checks that every rank has the same parameters. Collective.
///
/// # Errors
///
/// On every rank, a usage error that names the first parameter that differs and
/// the ranks that have it otherwise than rank 0.
pub(crate) fn check_agreement(parameters: &[Parameter], group: &ProcessGroup) -> Result<()> {
    if group.world_size() == 1 {
        return Ok(());
    }
    let lists = group.all_gather_object(&parameters.to_vec())?;
    match first_difference(&lists) {
        None => Ok(()),
        Some(difference) => Err(Error::usage(format!(
            "the module is not the same on every rank: {difference}. Build the same module with \
             the same configuration on every rank"
        ))),
    }
}

/// Describes the first difference between the lists of all ranks.
fn first_difference(lists: &[Vec<Parameter>]) -> Option<String> {
    let (reference, others) = lists.split_first()?;
    let longest = lists.iter().map(Vec::len).max()?;
    for position in 0..longest {
        let expected = reference.get(position);
        let differing: Vec<(usize, Option<&Parameter>)> = others
            .iter()
            .enumerate()
            .map(|(other, list)| (other + 1, list.get(position)))
            .filter(|(_, found)| match (expected, found) {
                (Some(expected), Some(found)) => !expected.same_as(found),
                (None, None) => false,
                _ => true,
            })
            .collect();
        if let Some((_, found)) = differing.first() {
            let describe =
                |p: Option<&Parameter>| p.map_or("nothing".to_owned(), Parameter::describe);
            let ranks: Vec<usize> = differing.iter().map(|(rank, _)| *rank).collect();
            return Some(format!(
                "tensor {position} is {} on rank 0, but {} on {}",
                describe(expected),
                describe(*found),
                name_ranks(&ranks),
            ));
        }
    }
    None
}

/// `rank 3` or `ranks 1, 2`.
pub(crate) fn name_ranks(ranks: &[usize]) -> String {
    let list: Vec<String> = ranks.iter().map(usize::to_string).collect();
    match list.as_slice() {
        [one] => format!("rank {one}"),
        _ => format!("ranks {}", list.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameter(path: &str, shape: &[usize]) -> Parameter {
        Parameter {
            path: path.to_owned(),
            kind: Kind::Float,
            shape: shape.to_vec(),
            dtype: DType::F32,
            trainable: true,
            id: 0,
        }
    }

    #[test]
    fn ids_may_differ_between_ranks() {
        let mut other = parameter("weight", &[2, 3]);
        other.id = 7;
        let lists = [vec![parameter("weight", &[2, 3])], vec![other]];
        assert_eq!(first_difference(&lists), None);
    }

    #[test]
    fn the_first_difference_names_the_parameter_and_every_rank_that_has_it() {
        let mine = vec![parameter("a", &[2]), parameter("b", &[3])];
        let wider = vec![parameter("a", &[2]), parameter("b", &[4])];
        let text = first_difference(&[mine.clone(), wider.clone(), mine.clone(), wider])
            .expect("shapes differ");
        assert!(text.contains("`b`"), "{text}");
        assert!(text.contains("[3]") && text.contains("[4]"), "{text}");
        assert!(text.contains("ranks 1, 3"), "{text}");

        let shorter = vec![parameter("a", &[2])];
        let text = first_difference(&[mine, shorter]).expect("one is missing");
        assert!(text.contains("nothing on rank 1"), "{text}");
    }

    #[test]
    fn every_field_but_the_id_counts() {
        let base = parameter("a", &[2]);
        let mut frozen = base.clone();
        frozen.trainable = false;
        let mut half = base.clone();
        half.dtype = DType::F16;
        let mut int = base.clone();
        int.kind = Kind::Int;
        for other in [frozen, half, int, parameter("b", &[2])] {
            assert!(first_difference(&[vec![base.clone()], vec![other]]).is_some());
        }
    }

    #[test]
    fn trainable_twins_are_refused_and_frozen_ones_are_not() {
        let mut twins = vec![parameter("online", &[2]), parameter("target", &[2])];
        let error = check_distinct(&twins).expect_err("both are trainable");
        assert!(error.to_string().contains("`online` and `target`"));
        twins[1].trainable = false;
        assert!(check_distinct(&twins).is_ok());
    }
}
