"""Formats with their facts, and the recipe strings that name a whole cache."""

from dataclasses import dataclass

from kvx import _core
from kvx.html import table
from kvx.refusals import in_words


@dataclass(frozen=True)
class Format:
    """The facts of a format; everything else about it follows from them.

    The first of several choices is the default. ``group_sizes`` are numbers along head_dim that
    share a scale ("row": all of them).
    """

    name: str
    element: str
    element_bits: int
    group_sizes: list[str]
    scale_types: list[str]
    scale_rules: list[str]
    scale_sources: list[str]
    has_tensor_scale: bool
    packing: str
    head_dim_multiple: int
    recommended_options: str
    summary: str


class Formats(list[Format]):
    """Formats; a table in a notebook."""

    def _repr_html_(self) -> str:
        header = ("format", "bits", "groups", "scales", "options", "")
        return table(
            header,
            [
                (
                    fmt.name,
                    fmt.element_bits,
                    ", ".join(fmt.group_sizes),
                    ", ".join(fmt.scale_types),
                    fmt.recommended_options,
                    fmt.summary,
                )
                for fmt in self
            ],
        )


@dataclass(frozen=True)
class SideRecipe:
    """How keys, or values, are stored once they are quantised."""

    format: str
    group_size: str
    scale_type: str
    scale_rule: str
    scale_source: str
    scale_choice: str
    hadamard: bool


@dataclass(frozen=True)
class Recipe:
    """The meaning of a recipe string. The first ``sink_tokens`` and at least the ``recent_tokens``
    before every query, in whole blocks, stay in ``full_precision_format`` (None: every token is
    quantised when it is appended). ``rotary_format``: of a latent row's rotary numbers (None: as
    its others)."""

    text: str
    k: SideRecipe
    v: SideRecipe
    rotary_format: str | None
    sink_tokens: int
    recent_tokens: int
    full_precision_format: str | None


def formats() -> Formats:
    """All formats, in the order in which the documentation shows them."""
    return Formats(Format(**facts) for facts in _core.formats())


@in_words
def parse_recipe(text: str) -> Recipe:
    """What ``text`` means: ``"int8"``, ``"int8/int4"`` (keys/values), ``"nvfp4:auto"``, and
    ``"nvfp4+bf16"`` (of a latent cache's rows).

    Raises kvx.Error: names the part of the text that is wrong, and what was expected there.
    """
    fields = _core.parse_recipe(text)
    k, v = (SideRecipe(**fields.pop(side)) for side in ("k", "v"))
    return Recipe(k=k, v=v, **fields)


def recipe_options() -> list[tuple[str, str]]:
    """The options of a recipe, as (form, help)."""
    return _core.recipe_options()
