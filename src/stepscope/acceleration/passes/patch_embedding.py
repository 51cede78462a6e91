"""Convolutions of images whose kernels do not overlap, as a matmul.

    conv2d(images, weight, bias, stride=kernel size)   ->   linear(patches, weight, bias)

cuDNN pads the channels of images and transposes them and the result; the gradient of the weight
takes it longer than the rest of the embedding. Convolutions within a model, through which
gradients pass, stay: there it is as fast. So do those in float32, where a convolution may use TF32
and a matmul does not by default.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from stepscope.acceleration.passes.matching import (
    Applied,
    added,
    argument,
    calls_of,
    has_gradient,
    line_of,
    value_of,
)

aten = torch.ops.aten
NAME = "patch embedding"
_CONVOLUTIONS = (aten.conv2d.default, aten.conv3d.default)


def use_matmuls(graph: Graph) -> list[Applied]:
    """Replace the convolutions of a graph that embed patches."""
    outcomes = []
    for node in calls_of(graph, *_CONVOLUTIONS):
        if _embeds_patches(node):
            _replace(graph, node)
            outcomes.append(Applied(NAME, "a matmul of patches", line_of(node)))
    return outcomes


def _embeds_patches(node: Node) -> bool:
    image, weight, output = value_of(node.args[0]), value_of(node.args[1]), value_of(node)
    kernel = tuple(weight.shape[2:])
    sizes = (*image.shape, *weight.shape)
    return (
        all(isinstance(n, int) for n in sizes)
        and all(n % k == 0 for n, k in zip(image.shape[2:], kernel, strict=False))
        and image.dim() == weight.dim()
        and tuple(argument(node, 3, "stride", ())) == kernel != (1,) * len(kernel)
        and not any(argument(node, 4, "padding", (0,)))
        and all(n == 1 for n in argument(node, 5, "dilation", (1,)))
        and argument(node, 6, "groups", 1) == 1
        and output.dtype in (torch.bfloat16, torch.float16)
        and output.is_contiguous()
        and not has_gradient(node.args[0])
    )


def _replace(graph: Graph, node: Node) -> None:
    image, weight = node.args[:2]
    kernel = value_of(weight).shape[2:]
    output = value_of(node).shape
    places = output[2:]
    count = len(kernel)
    with graph.inserting_before(node):
        # (batch, channels, places and offsets in turn) -> (batch, places, channels and offsets)
        pairs = [n for pair in zip(places, kernel, strict=True) for n in pair]
        x = added(graph, aten.reshape.default, image, [*value_of(image).shape[:2], *pairs])
        order = [0, *range(2, 2 + 2 * count, 2), 1, *range(3, 2 + 2 * count, 2)]
        x = added(graph, aten.permute.default, x, order)
        x = added(graph, aten.reshape.default, x, [output[0], places.numel(), -1])
        rows = added(graph, aten.reshape.default, weight, [output[1], -1])
        made = added(graph, aten.linear.default, x, rows, argument(node, 2, "bias"))
        made.meta = node.meta | {"val": made.meta["val"]}
        made = added(graph, aten.transpose.int, made, 1, 2)
        made = added(graph, aten.reshape.default, made, list(output))
        last = added(graph, aten.contiguous.default, made)
    last.meta = dict(node.meta)
    node.replace_all_uses_with(last)
    graph.erase_node(node)
