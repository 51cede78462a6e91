"""Names of models and their modules in tables."""

from __future__ import annotations

import torch

from stepscope.measure.modules import all_named_parts, model_names
from watched_models import Network


class TestModelNames:
    def test_a_single_model_needs_no_name(self) -> None:
        assert model_names([Network()]) == [""]
        assert model_names([]) == []

    def test_different_classes_are_enough(self) -> None:
        assert model_names([Network(), torch.nn.Linear(2, 2)]) == ["Network", "Linear"]

    def test_models_without_a_variable_get_a_number(self) -> None:
        models = [Network(), torch.nn.Identity(), Network(), Network()]
        assert model_names(models) == ["Network", "Identity", "Network #2", "Network #3"]

    def test_layers_of_a_sequential_are_named_by_class(self) -> None:
        mixed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        alike = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        both = torch.nn.ModuleDict({"mixed": mixed, "alike": alike})
        names = [name for name, _ in all_named_parts(both)]
        assert names == [
            "",
            "mixed",
            "mixed.0 Linear",
            "mixed.1 ReLU",
            "alike",
            "alike.0",
            "alike.1",
        ]
        assert [module for _, module in all_named_parts(both)] == list(both.modules())

    def test_the_outermost_function_decides(self) -> None:
        def inner(model: Network, other: Network) -> list[str]:
            return model_names([model, other])

        policy, value = Network(), Network()
        assert inner(policy, value) == ["Network policy", "Network value"]

    def test_attributes_of_self_are_used(self) -> None:
        class Trainer:
            def __init__(self) -> None:
                self.teacher, self.student = Network(), Network()

            def fit(self) -> list[str]:
                return model_names([self.student, self.teacher])

        assert Trainer().fit() == ["Network student", "Network teacher"]
