"""What the stock class calls the modules whose tensors a file names otherwise.

transformers renames tensors while it loads them: older files of ViT say `encoder.layer.0.attention.attention.query`
where the class has `layers.0.attention.q_proj`, and files of a bare base model lack its prefix. Its own renaming is
asked here, so that the answer is what a load does.
"""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key


def module_finder(model: PreTrainedModel) -> Callable[[str], str | None]:
    """A function from the name in a file, without ".weight", to the name in `model`; None for what it lacks."""
    modules = {name for name, _ in model.named_modules()}
    renamings = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]
    prefix = f"{model.base_model_prefix}."

    def find(name: str) -> str | None:
        renamed = rename_source_key(f"{name}.weight", renamings, [])[0].removesuffix(".weight")
        candidates = (name, renamed, prefix + renamed, renamed.removeprefix(prefix))
        return next((candidate for candidate in candidates if candidate in modules), None)

    return find
