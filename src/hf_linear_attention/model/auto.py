# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Everything that this package changes in Transformers, each change with its reason.

No other file changes it. The code in a model's folder makes those for its classes that it needs
(remote/stand_ins/model/auto.py). These are the names:

- `AttentionInterface._global_mapping[hf_linear_attention_in_vllm]`
- `AttentionInterface.get_interface`
- `ATTN_TYPE_TO_ALLOCATOR[linear_attention]`
- `BaseHandler._build_generation_config`
- `BaseHandler._resolve_model`
- `EncoderDecoderModel._prepare_cache_for_generation`
- `GenerationMixin.init_continuous_batching`
- `GenerationState.__init__`
- `MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[linear_attention]`
- `PreTrainedModel.__call__`
- `PreTrainedModel.__init_subclass__`
- `SpeechEncoderDecoderModel._prepare_cache_for_generation`
- `VisionEncoderDecoderModel._prepare_cache_for_generation`
- `_LazyAutoMapping._extra_content[LinearAttentionConfig]`
- `_LazyConfigMapping._extra_content[linear_attention]`
- `transformers.LinearAttentionForCausalLM`
- `transformers.cli.serving.server.FastAPI`

And in PEFT the tables of modules that it adapts, in Accelerate `Accelerator._prepare_cp`.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import transformers
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    EncoderDecoderModel,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    SpeechEncoderDecoderModel,
    VisionEncoderDecoderModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def register_config(config_class: type[PreTrainedConfig], causal_lm: str) -> None:
    """What is needed as soon as a config is there.

    `transformers serve` looks for the class that a config names, `causal_lm`, in its
    `transformers`, as soon as it has the config. It finds the Auto class, which loads the right
    one. Its `transformers` may not be ours: importing transformers.processing_utils makes a second
    module of that name.
    """
    serving = sys.modules.get("transformers.cli.serving.model_manager")
    for module in {transformers, getattr(serving, "transformers", transformers)}:
        setattr(module, causal_lm, AutoModelForCausalLM)


def register_adapters(model_type: str) -> None:
    """What PEFT adapts where a config of its own names no modules, as of Llama's, whose names our
    modules have. It looks that up by the type of a model, after it has turned the model's config
    into a dict; so this is called then, and PEFT need not be there before.
    """
    constants = sys.modules.get("peft.utils.constants")
    for name, table in vars(constants).items() if constants else ():
        if name.endswith("_MODULES_MAPPING") and "llama" in table:
            table.setdefault(model_type, table["llama"])


def register_models(
    config_class: type[PreTrainedConfig], auto_classes: dict[Any, type[PreTrainedModel]]
) -> None:
    """Makes Auto classes find the models of a config, and three parts of Transformers treat them as
    they treat its own.
    """
    for auto_class, model_class in auto_classes.items():
        auto_class.register(config_class, model_class, exist_ok=True)
        model_class.auto_classes = auto_classes
    # Trainer shifts the labels for label smoothing only where this table has the class's name
    model_type = config_class.model_type
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] = auto_classes[AutoModelForCausalLM].__name__
    # Encoder-decoder models make caches that no linear-attention layer can use.
    for whole in (EncoderDecoderModel, SpeechEncoderDecoderModel, VisionEncoderDecoderModel):
        whole._prepare_cache_for_generation = _cache_of_decoder(model_type)


def _cache_of_decoder(model_type: str) -> Callable[..., None]:
    """`_prepare_cache_for_generation` of an encoder-decoder model: by its decoder, if that is of
    model_type.
    """

    def prepare_cache(self, generation_config, model_kwargs, *args) -> None:
        if self.config.decoder.model_type == model_type:
            self.decoder._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        else:
            GenerationMixin._prepare_cache_for_generation(
                self, generation_config, model_kwargs, *args
            )

    return prepare_cache


def register_base_model(config: PreTrainedConfig, base_model: type[PreTrainedModel]) -> None:
    """Heads ask AutoModel for their base. Transformers may load a folder's config and model from
    two copies of the code, and then the class of `config` is not the one that was registered.
    """
    AutoModel.register(type(config), base_model, exist_ok=True)


def register_model_type(config_class: type[PreTrainedConfig]) -> None:
    """Makes `from_pretrained` take the installed package's classes without trust_remote_code. Only
    the package does this: the code of one checkpoint must not serve others.
    """
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)


def observe_model_classes(observe: Callable[[type[PreTrainedModel]], None]) -> None:
    """Lets `observe` see each class of models that is defined from now on. Only the package does
    this, where code that it saved before would be wrong (remote/saved_code.py).
    """
    inherit = PreTrainedModel.__init_subclass__.__func__

    @functools.wraps(inherit)
    def inherit_observed(cls, **kwargs):
        inherit(cls, **kwargs)
        observe(cls)

    PreTrainedModel.__init_subclass__ = classmethod(inherit_observed)


def add_attention(name: str, function: Callable[..., Any]) -> None:
    """Makes a function one that a config may name for softmax layers. Only the package does this,
    for an engine that keeps keys and values itself, under a name that nobody else has.
    """
    AttentionInterface.register(name, function)


_observers: list[Callable[[Callable, str], Any]] = []


def observe_attention(observe: Callable[[Callable, str], Any], is_first: bool = False) -> None:
    """Lets bounded caches see what attention functions do, and modules that `use_kernels` changed
    have a faster one; to others nothing changes.

    A cache sees keys and no queries. Every attention module asks Transformers' interface for its
    function right after it has updated the cache: `observe(function, name)` says what it gets, of
    what one that `is_first` has made of it. Only the package does this, when a bounded cache is
    made, and where a user asks for `use_kernels`.
    """
    if observe not in _observers:
        _observers.insert(0 if is_first else len(_observers), observe)
    get_interface = AttentionInterface.get_interface
    if hasattr(get_interface, "is_observed"):
        return

    @functools.wraps(get_interface)
    def get_observed_interface(self, attn_implementation, default):
        function = get_interface(self, attn_implementation, default)
        for each in _observers:
            function = each(function, attn_implementation)
        return function

    get_observed_interface.is_observed = True  # type: ignore[attr-defined]
    AttentionInterface.get_interface = get_observed_interface


_preparations: list[Callable[[PreTrainedModel], None]] = []


def before_forwards(prepare: Callable[[PreTrainedModel], None]) -> Callable[[], None]:
    """Lets `prepare` see every model of Transformers each time before it is called, or is to serve
    continuous batches, until what this returns is called. Only the package does this, where a user
    asks for `use_kernels_everywhere`.
    """

    def call(self, *args, **kwargs):
        if not torch.compiler.is_compiling():
            for each in tuple(_preparations):
                each(self)
        return torch.nn.Module.__call__(self, *args, **kwargs)

    def init_continuous_batching(self, *args, **kwargs):
        before = type(self)
        for each in tuple(_preparations):
            each(self)
        is_changed = type(self) is not before
        asked: Any = self if is_changed else super(GenerationMixin, self)
        return asked.init_continuous_batching(*args, **kwargs)

    def stop() -> None:
        if prepare in _preparations:
            _preparations.remove(prepare)
        if not _preparations and "__call__" in vars(PreTrainedModel):
            del PreTrainedModel.__call__
            del GenerationMixin.init_continuous_batching

    _preparations.append(prepare)
    if "__call__" not in vars(PreTrainedModel):
        PreTrainedModel.__call__ = call
        GenerationMixin.init_continuous_batching = init_continuous_batching
    return stop


def before_context_parallel(
    prepare: Callable[[Any, tuple[Any, ...]], bool],
    refuse: Callable[[Any, tuple[Any, ...]], None],
    gathering: Callable[[Any, Any], AbstractContextManager],
) -> None:
    """Lets `prepare` see an Accelerator with cp_size > 1 and what it is given to prepare: where it
    returns True, all is done. `refuse` sees what one is given to prepare for DeepSpeed. `gathering`
    is entered with what one gathers for metrics, and gives what to gather in its place. Only the
    package does this, whose models share sequences themselves: Accelerate refuses layers like
    theirs. Transformers has imported it, if it is there.
    """
    module = sys.modules.get("accelerate.accelerator")
    if module is None or hasattr(module.Accelerator._prepare_cp, "is_preceded"):
        return
    accelerator = module.Accelerator
    prepare_cp, prepare_deepspeed = accelerator._prepare_cp, accelerator._prepare_deepspeed
    gather_for_metrics = accelerator.gather_for_metrics

    @functools.wraps(prepare_cp)
    def prepare_cp_or_leave_it(self, *objects):
        return objects if prepare(self, objects) else prepare_cp(self, *objects)

    @functools.wraps(prepare_deepspeed)
    def refuse_or_prepare(self, *objects):
        refuse(self, objects)
        return prepare_deepspeed(self, *objects)

    @functools.wraps(gather_for_metrics)
    def gather(self, input_data, *args, **kwargs):
        with gathering(self, input_data) as data:
            return gather_for_metrics(self, data, *args, **kwargs)

    prepare_cp_or_leave_it.is_preceded = True  # type: ignore[attr-defined]
    accelerator._prepare_cp = prepare_cp_or_leave_it
    accelerator._prepare_deepspeed = refuse_or_prepare
    accelerator.gather_for_metrics = gather


_making_a_paged_cache = threading.RLock()


@contextmanager
def allocators_of_paged_cache(allocators: dict[str, type]) -> Iterator[None]:
    """Lets Transformers' paged cache be made with these allocators for types of layers.

    It looks them up in a table of its own, which has none for "linear_attention". The table is as
    before behind the `with`: other models of the process are to get what Transformers has for them.
    Only the package does this, for continuous batching.
    """
    from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR

    with _making_a_paged_cache:
        before = dict(ATTN_TYPE_TO_ALLOCATOR)
        ATTN_TYPE_TO_ALLOCATOR.update(allocators)
        try:
            yield
        finally:
            ATTN_TYPE_TO_ALLOCATOR.clear()
            ATTN_TYPE_TO_ALLOCATOR.update(before)


@contextmanager
def functions_in_module(module: Any, functions: dict[str, Callable]) -> Iterator[None]:
    """Puts functions in the place of those of the same names in a module of Transformers', for
    whoever calls them meanwhile; names that it lacks are left out. The package does this while it
    writes a model down as a graph.
    """
    before = {name: getattr(module, name) for name in functions if hasattr(module, name)}
    try:
        for name in before:
            setattr(module, name, functions[name])
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


@contextmanager
def experts_by(function: Callable, config: Any) -> Iterator[None]:
    """Lets a function compute the mixtures of experts of a model with this config, by the name that
    Transformers asks configs for. The package does this while it writes a model down as a graph.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    name, before = function.__name__, getattr(config, "_experts_implementation", None)
    ALL_EXPERTS_FUNCTIONS[name] = function
    config._experts_implementation = name
    try:
        yield
    finally:
        config._experts_implementation = before
        del ALL_EXPERTS_FUNCTIONS[name]


def observe_server(checked: Callable[..., Any], middleware: Any) -> None:
    """Of a `transformers serve --continuous-batching`: lets `checked` see the body of each request,
    what makes a GenerationConfig of it, which `checked` is to return, the model and its processor;
    and makes the app with a middleware. Only the package does this, in a process that has
    Transformers' server.

    Numbers that are none raise an error there that is answered with 500, as if the server were
    broken. The app is made behind the first model, and the function that makes it, which then is a
    local name already, gives no way to add to it; but it finds the app's class in its module.
    """
    from starlette.middleware import Middleware
    from transformers.cli.serving import server
    from transformers.cli.serving.utils import BaseHandler, GenerationState

    build, begin = BaseHandler._build_generation_config, GenerationState.__init__
    resolve, asked = BaseHandler._resolve_model, ContextVar[Any]("asked", default=None)
    if hasattr(build, "is_checked"):
        return

    @functools.wraps(resolve)
    def resolve_observed(self, body):  # once for each request, before its numbers are read
        resolved = resolve(self, body)
        asked.set(resolved[1:])
        return resolved

    @functools.wraps(build)
    def build_checked(self, body, model_generation_config, use_cb=False):
        make = functools.partial(build, self, body, model_generation_config, use_cb=use_cb)
        if not use_cb:
            return make()
        if asked.get() is None:  # its model is loaded, and has brought this package
            self._resolve_model(body)
        return checked(body, make, *asked.get())

    app_class = server.FastAPI
    app_with_middleware = functools.partial(app_class, middleware=[Middleware(middleware)])

    @functools.wraps(begin)
    def begin_observed(self, continuous_batching=False, *others, **options):
        begin(self, continuous_batching, *others, **options)
        server.FastAPI = app_with_middleware if continuous_batching else app_class

    build_checked.is_checked = True  # type: ignore[attr-defined]
    BaseHandler._resolve_model = resolve_observed
    BaseHandler._build_generation_config = build_checked
    GenerationState.__init__ = begin_observed
