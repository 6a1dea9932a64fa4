"""`gpuaccel plan`: predict the step on N GPUs, its failures and its checkpoints. Needs no GPU."""

from .arguments import add_command, number


def add_parser(commands):
    """Add `gpuaccel plan`."""
    parser = add_command(
        commands, "plan", run, "predict the step of N GPUs, failures and checkpoints; needs no GPU"
    )
    add = parser.add_argument
    add("--model", default="llama-350m", metavar="NAME", help="a preset (llama-350m)")
    add("--gpus", type=number(1), required=True, metavar="N", help="of all machines together")
    add("--per-machine", type=number(1), default=8, metavar="N", help="GPUs of a machine (8)")
    add("--micro-batches", type=number(1, 10**6), default=4, metavar="N", help="of a step (4)")
    rate = number(1e-3, kind=float)
    add(
        "--step-ms",
        type=rate,
        metavar="MS",
        help="a step on one GPU that trains alone (default: as recorded for llama-350m)",
    )
    add(
        "--link-GBs",
        type=rate,
        metavar="GB/S",
        help="between the GPUs of a machine, each direction (default: as recorded)",
    )
    add(
        "--network-GBs",
        type=rate,
        metavar="GB/S",
        help="of each GPU to other machines: a machine's network cards over its GPUs (50)",
    )


def run(args) -> int:
    from ..learn import planning

    known = planning.inputs(
        args.model,
        args.per_machine,
        args.micro_batches,
        args.step_ms,
        args.link_GBs,
        args.network_GBs,
    )
    workload, gpus = known.workload, args.gpus
    table = planning.plan_table(workload, known.machine, gpus)
    machines = -(-gpus // args.per_machine)
    where = f"{gpus:,} GPUs" + (f", {machines:,} machines" if machines > 1 else "")
    print(f"{workload.name} on {where}: predicted, not measured")
    print(f"one GPU alone: {workload.step_ms:.1f} ms for each step\n")
    print(table)
    c = planning.checkpoint_plan(workload, gpus)
    print(
        f"\nfailures of a rank: {c.failures_per_day:.3g} a day\n"
        f"checkpoints: {c.checkpoint_s:.1f} s each, every {c.interval_s / 60:.0f} minutes; "
        f"{c.lost:.2%} of the time does not train\n"
    )
    for kind, words in known.sources:
        print(f"{kind}: {words}")
    return 0
