"""What ``torch.optim.Optimizer`` promises, kept by an optimizer that wraps another one."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


class WrappedOptimizer(torch.optim.Optimizer):
    """An optimizer whose groups, state, defaults and hooks are, live, those of ``inner``.

    Args:
        inner: the optimizer that is wrapped.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self._ready = False
        super().__init__(inner.param_groups, inner.defaults)
        self._ready = True

    @staticmethod
    def profile_hook_step(func: Any) -> Any:
        """The inner optimizer's step is profiled and runs the hooks; a second time would be too often."""
        return func

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._ready:  # torch.optim.Optimizer.__init__ assigns an empty list
            self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._ready:
            self.inner.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the inner optimizer's."""
        if self._ready:  # torch.optim.Optimizer.__init__ adds the groups that the inner optimizer has
            self.inner.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer's."""
        self.inner.zero_grad(set_to_none)

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        """As the inner optimizer's; ``hook(optimizer, args, kwargs)`` gets this one."""

        def inner_hook(inner: Any, args: Any, kwargs: Any) -> Any:
            result = hook(self, (self, *args[1:]), kwargs)
            return result and ((inner, *result[0][1:]), result[1])

        return self.inner.register_step_pre_hook(inner_hook)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        """As the inner optimizer's; ``hook(optimizer, args, kwargs)`` gets this one."""
        return self.inner.register_step_post_hook(
            lambda _, args, kwargs: hook(self, (self, *args[1:]), kwargs)
        )

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """As the inner optimizer's; ``hook(optimizer)`` gets this one."""
        return self.inner.register_state_dict_pre_hook(lambda _: hook(self), prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """As the inner optimizer's; ``hook(optimizer, state_dict)`` gets this one and the inner state."""
        return self.inner.register_state_dict_post_hook(lambda _, *rest: hook(self, *rest), prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """As the inner optimizer's; ``hook(optimizer, state_dict)`` gets this one and the inner state."""
        return self.inner.register_load_state_dict_pre_hook(lambda _, *rest: hook(self, *rest), prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """As the inner optimizer's; ``hook(optimizer)`` gets this one."""
        return self.inner.register_load_state_dict_post_hook(lambda _: hook(self), prepend)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} holds process groups and hooks, so it cannot be pickled or copied: save "
            "state_dict() and load it into a new one"
        )
