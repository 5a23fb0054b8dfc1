"""Layers by name, since an operator of a traced graph takes tensors, numbers and text alone."""

from kvx.errors import Error
from kvx.paged_layer import PagedLayer

_layers: dict[str, PagedLayer] = {}


def register_layer(layer: PagedLayer, name: str | None = None) -> str:
    """The name by which operators find the layer. It is kept until unregister_layer().

    name: of the model's own choice, such as ``"model.layers.0.attn"``; None: a new one

    Raises kvx.Error: another layer has this name; what is given is no kvx.PagedLayer.
    """
    if not isinstance(layer, PagedLayer):
        raise Error(f"layer is a {type(layer).__name__}; expected a kvx.PagedLayer")
    if name is None:
        number = len(_layers)
        while f"layer{number}" in _layers:
            number += 1
        name = f"layer{number}"
    if _layers.get(name, layer) is not layer:
        raise Error(f"name is {name!r}; another layer has it (unregister_layer({name!r}) first)")
    _layers[name] = layer
    return name


def unregister_layer(name: str) -> None:
    """Forgets the layer. Raises kvx.Error: there is none of this name."""
    registered_layer(name)
    del _layers[name]


def registered_layer(name: str) -> PagedLayer:
    """Raises kvx.Error: there is none of this name."""
    layer = _layers.get(name)
    if layer is None:
        raise Error(f"layer is {name!r}; expected a name that register_layer() has returned")
    return layer
