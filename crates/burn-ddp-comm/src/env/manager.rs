//! Ranks from the variables of Slurm's `srun` and Open MPI's `mpirun`.

use super::{Ranks, Reader};

/// The ranks that Slurm or Open MPI tell of; the outer `None` if they tell of
/// no more than one process, the inner if what they tell makes no sense, which
/// the reader has noted.
pub(super) fn ranks(reader: &mut Reader<'_>) -> Option<Option<Ranks>> {
    // First, since mpirun within a Slurm allocation leaves Slurm's variables of
    // the daemon that starts its processes.
    open_mpi(reader).or_else(|| slurm(reader))
}

/// Rank and world size where the two variables tell of several processes; each
/// `None` where its value is no number, which `reader` has noted.
fn place(
    reader: &mut Reader<'_>,
    rank: &'static str,
    size: &'static str,
) -> Option<(Option<usize>, Option<usize>)> {
    if !reader.is_set(rank) || !reader.is_set(size) {
        return None;
    }
    let world_size = reader.number(size);
    if world_size == Some(1) {
        return None;
    }
    Some((reader.number(rank), world_size))
}

fn open_mpi(reader: &mut Reader<'_>) -> Option<Option<Ranks>> {
    let (rank, size) = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
    let (number, world_size) = place(reader, rank, size)?;
    let local_rank = reader.number("OMPI_COMM_WORLD_LOCAL_RANK");
    let local_world_size = reader.number("OMPI_COMM_WORLD_LOCAL_SIZE");
    Some(complete(
        reader,
        (rank, number),
        (size, world_size),
        local_rank,
        local_world_size,
    ))
}

fn slurm(reader: &mut Reader<'_>) -> Option<Option<Ranks>> {
    let (rank, size) = ("SLURM_PROCID", "SLURM_NTASKS");
    let (number, world_size) = place(reader, rank, size)?;
    let local_rank = reader.number("SLURM_LOCALID");
    let node = reader.number("SLURM_NODEID");
    let tasks = reader
        .text("SLURM_STEP_TASKS_PER_NODE")
        .or_else(|| reader.text("SLURM_TASKS_PER_NODE"));
    // Where the tasks of this node are not told, local ranks are of no use.
    let local_world_size = tasks
        .zip(node)
        .and_then(|(tasks, node)| tasks_of_node(&tasks, node));
    Some(complete(
        reader,
        (rank, number),
        (size, world_size),
        local_world_size.and(local_rank),
        local_world_size,
    ))
}

fn complete(
    reader: &mut Reader<'_>,
    (rank_name, rank): (&str, Option<usize>),
    (size_name, world_size): (&str, Option<usize>),
    local_rank: Option<usize>,
    local_world_size: Option<usize>,
) -> Option<Ranks> {
    let ranks = Ranks {
        rank: rank?,
        world_size: world_size?,
        local_rank,
        local_world_size,
    };
    reader.check(&ranks, rank_name, size_name).then_some(ranks)
}

/// The tasks of node number `node` in a list like `2(x3),1`: three nodes of two
/// tasks and then one of one.
pub(super) fn tasks_of_node(list: &str, node: usize) -> Option<usize> {
    let mut first = 0_usize;
    for part in list.split(',') {
        let (tasks, nodes) = match part.trim().split_once("(x") {
            None => (part.trim(), 1),
            Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')')?.parse().ok()?),
        };
        first = first.checked_add(nodes)?;
        if node < first {
            return tasks.parse().ok();
        }
    }
    None
}
