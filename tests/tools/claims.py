# SPDX-License-Identifier: Apache-2.0
"""The claims of the README, and the tests and benchmarks that hold them."""

import re
from collections.abc import Iterator

from tree import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTIONS = ("Why", "Works with", "Limitations")

#: By the beginning of a claim: "FILE::TEST" below tests, or "bench NAME FIGURE".
HELD_BY = {
    "**Complete or absent.**": [
        "campaign/power.py",
        "campaign/act_file.c",
        "python/save/test_failures.py::test_a_full_disk_leaves_the_old_file",
    ],
    "**Fast.**": [
        "bench torch_save save_vs_torch",
        "bench torch_save cpu_vs_torch",
        "bench torch_background async_stall_vs_memcpy",
    ],
    "**Considerate.**": [
        "bench storm",
        "python/slots/test_slots_view.py::test_a_coordinator_that_is_away_fails_no_save_unless_told_to",
    ],
    "**Transparent.**": [
        "python/slots/test_slots_view.py::test_reports_are_told_in_one_line",
        "python/slots/test_slots_cli.py::test_top_shows_what_goes_on",
    ],
    "any script that calls": ["python/run/test_run.py::test_a_script_saves_and_loads_through_us"],
    "safetensors, transformers, accelerate": [
        "integrations/test_safetensors.py::test_a_script_saves_through_us",
        "integrations/test_huggingface.py::test_a_trainer_that_knows_nothing_of_us",
        "integrations/test_safetensors.py::test_a_model_of_accelerate_is_saved_by_us",
    ],
    "torch.distributed.checkpoint": [
        "integrations/test_dcp.py::test_a_script_under_ioshape_run_saves_through_us",
        "integrations/test_dcp.py::test_stock_dcp_reads_what_we_write",
    ],
    "Lightning": [
        "integrations/test_lightning.py::test_an_unchanged_script",
        "integrations/test_lightning.py::test_the_plug_ins",
    ],
    "DeepSpeed": [
        "integrations/test_deepspeed.py::test_an_unchanged_script",
        "integrations/test_deepspeed.py::test_the_json_configuration_names_us",
    ],
    "Megatron-core, Ray Train": [
        "integrations/test_megatron.py",
        "integrations/test_ray.py",
        "integrations/test_witness.py::test_no_byte_of_a_checkpoint_goes_past",
    ],
    "`cp`, `rsync`, JAX": [
        "system/test_preload_programs.py::test_a_program_does_the_same_with_the_library",
        "python/run/test_preload.py",
    ],
    "C and C++ programs": ["install/test_install.py"],
    "`ioshape run` cannot intercept": [
        "python/run/test_passed.py::test_what_goes_past_it_is_told_at_the_end"
    ],
    "A checkpoint of `save_group`": ["python/group/test_group.py::test_another_number_of_ranks"],
    "Small checkpoints of one process": ["bench torch_save tiny_vs_torch"],
    "Checkpoints are files.": ["python/remote/test_objects.py::test_the_commands"],
    "Where the kernel refuses io_uring": ["c/fault/test_refused_engines.c"],
}


def claims() -> Iterator[str]:
    """Yield the list items and table rows of the sections that make claims."""
    for section in SECTIONS:
        text = README.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
        yield from re.findall(r"^- (.*)$", text, re.MULTILINE)
        rows = re.findall(r"^\| ((?!framework|-).*)$", text, re.MULTILINE)
        yield from (row for row in rows if not row.startswith("---"))


def holders(claim: str) -> list[str]:
    """Return what holds a claim."""
    return [one for start, held in HELD_BY.items() if claim.startswith(start) for one in held]


def exists(holder: str) -> bool:
    """Return whether there is such a test or figure."""
    if holder.startswith("bench "):
        _, module, *figure = holder.split()
        text = (ROOT / "tests/bench" / f"{module}.py").read_text(encoding="utf-8")
        return not figure or f'"{figure[0]}"' in text
    path, _, test = holder.partition("::")
    file = ROOT / "tests" / path
    return file.is_file() and (not test or f"def {test}" in file.read_text(encoding="utf-8"))


def unproved() -> list[str]:
    """Return the claims that no existing test or figure holds."""
    return [one for one in claims() if not holders(one) or not all(map(exists, holders(one)))]
