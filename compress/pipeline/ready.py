"""What a format needs beside the weights, looked at before there are any: packages, and loaders that agree."""

from __future__ import annotations

from compress.pipeline.job import Job
from compress.plan.planning import Plan


def check_packages(plan: Plan) -> None:
    """Raises MissingResourceError if the package behind the planned format is missing or broken."""
    if plan.format_name == "bitsandbytes":
        from compress.formats import bitsandbytes

        bitsandbytes.imported()
    elif plan.format_name == "compressed-tensors":
        from compress.formats import compressed_tensors

        compressed_tensors.imported()


def check_model(job: Job) -> None:
    """Raises UsageError unless config, weights and class belong together and the class can hold what is planned.

    Of a model that is to be pruned first it is called before, and again for what came of it.
    """
    from compress.model.fit import check_fit

    if not job.checkpoint.has_weights:
        check_fit(job.plan.original, trust_remote_code=job.options.trust_remote_code)
        return
    parts = job.plan.anatomy
    found = job.plan.quantized if parts.by_name else ()
    packs = job.plan.format_name == "compressed-tensors"
    check_fit(
        job.checkpoint,
        trust_remote_code=job.options.trust_remote_code,
        found=[planned.layer for planned in found],
        packed=[one.layer for one in found if packs and one.scheme is not None and one.scheme.activation_bits is None],
        compressed=packs and bool(job.plan.quantized),
        reads_text=parts.kind != "other",
    )
    check_modules(job)


def check_modules(job: Job) -> None:
    """Raises UsageError, naming the layers, if transformers would not load what is planned to be quantized."""
    if job.plan.format_name == "bitsandbytes":
        from compress.formats.bitsandbytes import skipped_modules
        from compress.formats.class_names import by_class_names

        plan, trusted = job.plan, job.options.trust_remote_code
        _, schemes = by_class_names(job.checkpoint, plan.anatomy.layers, plan.schemes, trust_remote_code=trusted)
        skipped_modules(job.checkpoint, schemes.keys(), trust_remote_code=trusted)
