"""What models and their parts are called in tables."""

from __future__ import annotations

import torch

from stepscope.measure.modules import all_named_parts, model_names
from watched_models import Network


class TestModelNames:
    def test_one_alone_needs_none(self) -> None:
        assert model_names([Network()]) == [""]
        assert model_names([]) == []

    def test_other_classes_are_enough(self) -> None:
        assert model_names([Network(), torch.nn.Linear(2, 2)]) == ["Network", "Linear"]

    def test_what_no_function_has_gets_a_number(self) -> None:
        models = [Network(), torch.nn.Identity(), Network(), Network()]
        assert model_names(models) == ["Network", "Identity", "Network #2", "Network #3"]

    def test_layers_in_a_row_go_by_their_class(self) -> None:
        mixed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        alike = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        whole = torch.nn.ModuleDict({"mixed": mixed, "alike": alike})
        names = [name for name, _ in all_named_parts(whole)]
        assert names == [
            "", "mixed", "mixed.0 Linear", "mixed.1 ReLU", "alike", "alike.0", "alike.1",
        ]  # fmt: skip
        assert [module for _, module in all_named_parts(whole)] == list(whole.modules())

    def test_the_outermost_function_decides(self) -> None:
        def inner(model: Network, other: Network) -> list[str]:
            return model_names([model, other])

        policy, value = Network(), Network()
        assert inner(policy, value) == ["Network policy", "Network value"]

    def test_attributes_of_what_runs_count(self) -> None:
        class Trainer:
            def __init__(self) -> None:
                self.teacher, self.student = Network(), Network()

            def fit(self) -> list[str]:
                return model_names([self.student, self.teacher])

        assert Trainer().fit() == ["Network student", "Network teacher"]
