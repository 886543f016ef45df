# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Saving of configs and models, together with the code that loads them without the package."""

from contextvars import ContextVar
from typing import Any

from transformers.dynamic_module_utils import get_class_from_dynamic_module

CONFIGURATION, MODELING = "configuration_linear_attention", "modeling_linear_attention"

# Whether configs that are saved get their code.
_is_code_wanted: ContextVar[bool] = ContextVar("is_code_wanted", default=True)


class RegisteredHere:
    """Transformers saves the files of a class that is registered for an Auto class, with all that
    they import. Of the package's own classes it is to save none: what is saved with their models is
    made by code.py. A user's subclass is registered when it is saved, as its parent would be.
    """

    _auto_class: Any

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        if not is_of_package(cls):
            given = () if auto_class is None else (auto_class,)
            super().register_for_auto_class(*given)  # type: ignore[misc]


def is_of_package(cls: type) -> bool:
    """Whether a class is no user's: FSDP2 puts one of its own before that of a model."""
    return cls.__module__.split(".")[0] in (__name__.split(".")[0], "torch")


class SavedConfig(RegisteredHere):
    """Of a config."""

    auto_map: dict[str, str]

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As in Transformers; the directory also holds this class's code."""
        from ..remote.code import write_code

        if _is_code_wanted.get():
            if self._auto_class is None:
                self.register_for_auto_class()  # for a user's class
            known = getattr(self, "auto_map", None) or {}
            self.auto_map = {**known, "AutoConfig": f"{CONFIGURATION}.LinearAttentionConfig"}
            write_code(save_directory, self, CONFIGURATION)
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]


class SavedModel(RegisteredHere):
    """Of a model."""

    config: Any
    auto_classes: dict[Any, type]  # of all models, by the Auto class that loads them

    @classmethod
    def from_pretrained(cls, name_or_path, *args, config=None, **kwargs):
        """As in Transformers. Its Auto classes ask the package's own class where a folder's code
        has a subclass of it: that one loads the model, if it may.
        """
        theirs = cls.named_in(config) if is_of_package(cls) else None
        if theirs is None:
            return super().from_pretrained(  # type: ignore[misc]
                name_or_path, *args, config=config, **kwargs
            )
        if not kwargs.get("trust_remote_code"):
            raise ValueError(
                f"the model in {name_or_path} is of a class of its own, {theirs}: "
                "trust_remote_code=True lets that load it"
            )
        named = get_class_from_dynamic_module(theirs, name_or_path)
        return named.from_pretrained(name_or_path, *args, config=config, **kwargs)

    @classmethod
    def named_in(cls, config: Any) -> str | None:
        """The class that a folder's config names in the place of this one."""
        names = getattr(config, "auto_map", None) or {}
        for auto_class, own in cls.auto_classes.items():
            name = names.get(auto_class.__name__, MODELING)
            if own is cls and name.split("--")[-1].split(".")[0] != MODELING:
                return name
        return None

    def save_pretrained(
        self, save_directory, is_main_process=True, *args, code: bool = True, **kwargs
    ):
        """As in Transformers. The directory also holds the code that loads the model where the
        package is not installed, for every Auto class, unless code=False.
        """
        from ..remote.code import definitions_left_out, write_code

        if code:
            left_out = definitions_left_out(self.config)
            self.config.auto_map = {
                auto_class.__name__: f"{MODELING}.{model_class.__name__}"
                for auto_class, model_class in self.auto_classes.items()
                if model_class.__name__ not in left_out
            }
            if self._auto_class is None:
                found = [auto for auto, own in self.auto_classes.items() if isinstance(self, own)]
                self.register_for_auto_class(*found[:1])
            if is_main_process:
                write_code(save_directory, self.config, MODELING)
        elif getattr(self.config, "auto_map", None) is not None:
            del self.config.auto_map
        before = _is_code_wanted.set(code)
        try:
            super().save_pretrained(  # type: ignore[misc]
                save_directory, is_main_process, *args, **kwargs
            )
        finally:
            _is_code_wanted.reset(before)
