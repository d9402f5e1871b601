"""Makes the table of what works with PyTorch, for docs/pytorch.md; each row names the tests that stand behind it.

`python docs/generate/tables.py` puts it there; the columns say how many of those tests passed on a CPU and on a GPU, as
`python benchmarks/suite.py` found.
"""

from typing import Any

from results_markdown import load

URL = "../tests/"

# heading, then rows of (what, how, tests)
ROWS: dict[str, list[tuple[str, str, list[str]]]] = {
    "Inputs and devices": [
        (
            "float32, float64, bfloat16, float16",
            "points are built in float32 at least",
            ["torch_support/test_precision::test_input_of_every_precision"],
        ),
        ("non-contiguous, expanded", "", ["test_box::test_strided_input"]),
        ("any leading shape", "", ["test_box::test_any_leading_shape"]),
        (
            "box on another device than x",
            "a module's rows are made where it lives",
            [
                "torch_support/test_devices::test_a_box_on_another_device_than_x",
                "torch_support/test_devices::test_a_function_that_moves_its_rows_itself",
            ],
        ),
        (
            "numpy box, x on a GPU",
            "x goes to the CPU once, and its gradient comes back",
            [
                "torch_support/test_devices::test_numpy_boxes_are_fed_from_the_gpu",
                "torch_support/test_devices::test_numpy_rows_are_made_on_the_cpu",
            ],
        ),
    ],
    "State": [
        (
            "`state_dict`, `torch.load(weights_only=True)`, `deepcopy`, pickle",
            "goes on bit for bit, random numbers included",
            ["step/test_state::test_a_copy_goes_on_bit_for_bit"],
        ),
        (
            "a checkpoint from another device",
            "",
            [
                "step/test_state::test_a_checkpoint_from_another_device_can_be_loaded",
                "torch_support/test_devices::test_a_state_moves_between_devices",
            ],
        ),
        (
            "`.half()`, `.bfloat16()`, `.double()`",
            "neither box nor state goes below float32",
            [
                "torch_support/test_precision::test_the_policys_state_keeps_its_precision",
                "torch_support/test_precision::test_a_model_of_another_precision_around_a_module",
            ],
        ),
        ("the meta device", "", ["step/test_state::test_made_on_the_meta_device_and_filled_later"]),
    ],
    "Precision": [
        (
            "autocast around it",
            "off inside, unless `full_precision=False`",
            [
                "torch_support/test_precision::test_autocast_does_not_reach_into_the_box",
                "torch_support/test_precision::test_autocast_reaches_the_box_only_if_asked",
            ],
        ),
        (
            "TF32, bf16 products of float32",
            "off inside, unless `full_precision=False`",
            [
                "torch_support/test_precision::test_shortcuts_of_float32_are_off_inside_and_back_afterwards",
                "torch_support/test_precision::test_threads_do_not_disturb_one_another",
                "torch_support/test_precision::test_tf32_outside_does_not_harm_the_gradient_inside",
            ],
        ),
        (
            "`GradScaler`",
            "overflows are handed on, and not remembered",
            ["test_training_loops::test_a_loss_scaler_finds_its_scale"],
        ),
    ],
    "Training loops": [
        ("gradient accumulation", "", ["test_training_loops::test_gradient_accumulation"]),
        ("gradient clipping", "", ["test_training_loops::test_gradient_clipping"]),
        (
            "activation checkpointing: reentrant or not, nested, selective",
            "the box is not called again",
            [
                "torch_support/test_checkpoint::test_the_same_gradients_state_and_cost",
                "torch_support/test_checkpoint::test_a_box_that_counts_its_calls_is_called_once_a_forward_pass",
                "torch_support/test_checkpoint::test_several_passes_are_told_apart",
                "torch_support/test_checkpoint::test_random_numbers_drawn_by_the_box_and_after_it",
                "torch_support/test_checkpoint::test_nested_checkpoints",
                "torch_support/test_checkpoint::test_selective_checkpointing",
            ],
        ),
        (
            "data loaders with worker processes",
            "also with a box inside",
            ["test_training_loops::test_a_box_in_the_processes_of_a_data_loader"],
        ),
        (
            "several boxes, `nn.ModuleList`",
            "",
            [
                "test_training_loops::test_boxes_in_a_module_list",
                "test_box::test_several_boxes_in_one_model_do_not_interfere",
            ],
        ),
        ("a box used twice in one graph", "", ["test_box::test_a_box_used_twice_in_one_graph"]),
        (
            "several backward passes (`retain_graph`)",
            "each estimates anew",
            ["test_box::test_retained_graphs_give_a_gradient_each_time"],
        ),
        (
            "exceptions, Ctrl-C in the middle of a step",
            "the state is that before the step",
            ["test_training_loops::test_after_an_exception_training_goes_on_bit_for_bit"],
        ),
        (
            "Lightning, Hugging Face Accelerate",
            "train the demo's model as a plain loop does, bit for bit",
            ["test_training_loops::test_libraries_train_as_a_plain_loop_does"],
        ),
    ],
    "Structure and memory": [
        (
            "a pattern, `Blocks`",
            "the same gradient, bit for bit the same every time",
            ["structure/test_structure::test_same_gradient_as_dense", "structure/test_structure::test_on_each_device"],
        ),
        (
            '`structure="auto"`',
            "found in the first training step, saved with the model, watched",
            [
                "structure/discovery/test_watch::test_auto",
                "structure/discovery/test_watch::test_resuming_goes_on_bit_for_bit",
                "structure/discovery/test_watch::test_a_dependency_that_wakes_late",
                "torch_support/test_graphs_of_structures::test_a_dependency_that_wakes_is_noticed_between_replays",
            ],
        ),
        (
            "sequences",
            "any leading shape before time; also compiled and transformed",
            [
                "structure/test_sequence::test_shapes",
                "structure/test_sequence::test_on_each_device",
                "structure/test_sequence::test_transforms",
                "torch_support/test_compile::test_sequences",
            ],
        ),
        (
            "boxes that remember",
            "only forward passes move them on; evaluation has a stream of its own",
            [
                "calling/test_memory::test_the_backward_pass_moves_nothing_on",
                "calling/test_memory::test_evaluation_has_a_stream_of_its_own",
                "calling/test_memory::test_checkpointing_does_not_call_it_twice",
                "calling/test_memory::test_saving_and_loading",
                "calling/test_memory::test_on_each_device",
                "torch_support/test_compile::test_memory_outside_of_the_graph",
            ],
        ),
        (
            "all of them in captured steps (`GraphedStep`)",
            "training goes as it would have, bit for bit",
            ["torch_support/test_graphs_of_structures::test_graphed_and_eager_training_agree"],
        ),
    ],
    "No gradient wanted": [
        (
            "`no_grad`, `inference_mode`, an input that needs no gradient",
            "one call on the batch, no trace",
            ["step/test_state::test_one_call_and_no_trace"],
        ),
        (
            "`eval()`",
            "the same; gradients still work, without a trace",
            [
                "step/test_state::test_one_call_and_no_trace",
                "step/test_state::test_gradients_in_eval_mode_leave_no_trace",
            ],
        ),
    ],
    "Compilers and transforms": [
        (
            "`torch.compile`, also `fullgraph=True`",
            "an opaque operator; same gradients as eager; give `out_features`",
            [
                "torch_support/test_compile::test_the_same_gradients_and_state_in_one_graph",
                "torch_support/test_compile::test_with_the_default_compiler",
                "torch_support/test_compile::test_a_width_not_told_costs_a_break_until_it_is_known",
            ],
        ),
        (
            '`torch.compile(mode="reduce-overhead")`',
            "its CUDA graphs leave the box out",
            ["torch_support/test_compile::test_the_compilers_own_cuda_graphs_leave_the_box_alone"],
        ),
        (
            "`torch.func`: `grad`, `vjp`, `jacrev`, `vmap`, `functional_call`",
            "what is mapped over becomes more rows",
            [
                "torch_support/test_func::test_grad_and_vjp",
                "torch_support/test_func::test_vmap_is_more_rows",
                "torch_support/test_func::test_gradients_of_each_sample",
            ],
        ),
        (
            "forward mode: `jvp`, `jacfwd`, `hessian`",
            "refused, with what to do instead",
            [
                "torch_support/test_func::test_forward_mode_is_refused",
                "torch_support/test_func::test_dual_numbers_are_refused",
            ],
        ),
        (
            "second derivatives",
            "refused",
            [
                "test_box::test_second_derivatives_are_refused",
                "torch_support/test_func::test_second_derivatives_are_refused",
            ],
        ),
    ],
    "Several processes": [
        (
            "`DistributedDataParallel`, 2 and 4 processes",
            "gradients and moments are those of one process on the joint batch; batches may be uneven",
            [
                "torch_support/test_ranks::test_several_processes_do_what_one_does_on_the_joint_batch",
                "torch_support/test_ranks::test_without_an_exchange_they_do_not",
                "torch_support/test_ranks::test_programs",
            ],
        ),
        (
            "FSDP around read-in and read-out",
            "the same; give `process_group`",
            ["torch_support/test_ranks::test_so_they_do_with_sharded_neighbours"],
        ),
    ],
    "CUDA graphs": [
        (
            "no waiting for the device",
            "",
            ["torch_support/test_devices::test_a_step_does_not_wait_for_the_device"],
        ),
        (
            "whole steps: `GraphedStep`",
            "captured and eager training agree bit for bit (on a CPU it runs as it is)",
            [
                "torch_support/test_graphs::test_graphed_and_eager_training_agree",
                "torch_support/test_graphs::test_whatever_happens_between_steps_counts",
                "torch_support/test_graphs::test_what_moves_in_memory_is_noticed",
                "torch_support/test_graphs::test_every_shape_that_keeps_coming_is_captured",
                "torch_support/test_graphs::test_hooks_run_after_every_step",
            ],
        ),
        (
            "a step that cannot be captured",
            "runs as it is, with a warning that says why",
            [
                "torch_support/test_graphs::test_what_cannot_be_captured_runs_as_it_is",
                "torch_support/test_graphs::test_a_box_that_must_run_as_python_does",
            ],
        ),
    ],
}


def pytorch_table() -> str:
    """Return the table in Markdown. A test that is named but passed nowhere is an error."""
    suites = {device: load(f"suite_{device}") for device in ("cpu", "cuda")}
    passed = {device: suite["numbers"]["functions"] for device, suite in suites.items()}
    lines = ["|  |  | CPU | GPU | tests |", "| --- | --- | ---: | ---: | --- |"]
    for heading, rows in ROWS.items():
        lines.append(f"| **{heading}** |  |  |  |  |")
        for what, how, tests in rows:
            names = [f"tests/{test.replace('::', '.py::')}" for test in tests]
            on_cpu = sum(passed["cpu"].get(name, {}).get("cpu", 0) for name in names)
            on_gpu = sum(passed["cuda"].get(name, {}).get("cuda", 0) for name in names)
            missing = [name for name in names if not passed["cpu"].get(name) and not passed["cuda"].get(name)]
            if missing:
                raise ValueError(f"{what}: no such test passed anywhere: {missing}")
            files = sorted({test.split("::")[0] for test in tests})
            links = ", ".join(f"[{file}]({URL}{file}.py)" for file in files)
            lines.append(f"| {what} | {how} | {on_cpu or '-'} | {on_gpu or '-'} | {links} |")
    return "\n".join([*lines, "", *(all_tests(suite) for suite in suites.values())])


def all_tests(suite: dict[str, Any]) -> str:
    """Return how many tests passed, where, and which did not, with the reason."""
    numbers = suite["numbers"]
    totals, where = numbers["totals"], suite["gpu"] or suite["machine"]
    counted = f"All tests, {where}: {totals['passed']} passed, {totals.get('failed', 0)} failed.  "
    failures = numbers.get("failures", {})
    return "\n".join([counted, *(f"Failed: `{test}`: {why}.  " for test, why in failures.items())])
