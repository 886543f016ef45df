# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Prompts that begin alike are read once in Transformers' continuous batching, and give the tokens
that `generate()` gives each.
"""

import logging
import os
import random
import time
from contextlib import contextmanager

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from engines import alone, engine, results, tokens_of, wait_until
from hf_linear_attention.cache.files import read_file, write_file
from hf_linear_attention.serving.broken_rows import NO_TOKEN
from hf_linear_attention.serving.shared_prompts import BYTES_VARIABLE, FOLDER_VARIABLE
from hf_linear_attention.serving.slot_layout import SlotLayout
from hf_linear_attention.serving.snapshot_files import FILE_FORMAT, WRITING_TAKES, fingerprint_of
from hf_linear_attention.serving.snapshots import (
    EVERY,
    FINE,
    Prompt,
    Snapshot,
    SnapshotStore,
    is_stop,
    next_stop,
    start_of,
)
from tiny import VARIANTS, random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS = {
    "gated": VARIANTS["gated"],  # with short convolutions
    "aaren": VARIANTS["aaren"],
    "gated_deltanet": VARIANTS["preset_gated_deltanet"],
    "hybrid": VARIANTS["hybrid"],  # with full attention, and a sliding window
    "kimi_linear": VARIANTS["preset_kimi_linear"],  # with latent attention
}
BOTH = pytest.mark.parametrize("name", ["gated", "hybrid"])
TEXT = random_ids(700, seed=1).tolist()
OTHER = random_ids(700, seed=2).tolist()


ANSWERS: dict[tuple, list[int]] = {}


def expected_of(model, prompt: list[int]) -> list[int]:
    """What generate() answers, once for each model that stays as it is."""
    key = id(model), tuple(prompt)
    if key not in ANSWERS:
        ANSWERS[key] = alone(model, prompt)
    return ANSWERS[key]


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(name: str):
        if name not in made:
            made[name] = tiny_model(**MODELS[name])
        return made[name]

    return get


@contextmanager
def sharing(model, settings: dict | None = None, max_bytes=None, folder=None, **generation):
    """An engine that shares prompts as `share_prompts` says."""
    with engine(model, settings, start=False, **generation) as manager:
        manager.share_prompts(max_bytes, folder)
        manager.start()
        yield manager


def ask(manager, *prompts) -> list[list[int]]:
    return tokens_of(results(manager, manager.add_requests(list(prompts))))


def shared_by(manager, prompt) -> tuple[int, list[int]]:
    """How many tokens were not read again, and the answer."""
    before = manager.shared_prompts()
    (answer,) = ask(manager, prompt)
    after = manager.shared_prompts()
    shared = after.tokens_shared - before.tokens_shared
    assert shared + after.tokens_read - before.tokens_read == len(prompt)
    is_hit = shared > 0
    assert after.hits - before.hits == is_hit
    assert after.misses - before.misses == (len(prompt) > EVERY and not is_hit)
    return shared, answer


# What is asked after TEXT, and how many tokens of it are not read again.
AFTER_TEXT = {
    "the same": (TEXT, 699),
    "goes on": (TEXT + OTHER[:5], 699),
    "few in common": (TEXT[:200] + OTHER[:100], 0),
    "a multiple in common": (TEXT[:512] + OTHER[:30], 512),
    "one less": (TEXT[:511] + OTHER[:30], 256),
    "one more": (TEXT[:513] + OTHER[:30], 512),
    "all but one": (TEXT[:699] + [TEXT[699] % 40 + 1], 699),
    "a piece": (TEXT[:256], 0),  # is read in one forward
    "a piece and one": (TEXT[:257], 256),
    "a piece and two": (TEXT[:258], 256),
    "nothing in common": (OTHER, 0),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_in_common_is_read_once_and_changes_no_token(name, models):
    model = models(name)
    with sharing(model) as manager:
        assert shared_by(manager, TEXT) == (0, expected_of(model, TEXT))
        for prompt, expected in AFTER_TEXT.values():
            assert shared_by(manager, prompt) == (expected, expected_of(model, prompt))


@BOTH
def test_a_chat_reads_what_is_new_in_each_turn(name, models):
    model, chat, before = models(name), TEXT[:250], 0
    with sharing(model) as manager:
        for turn in range(4):
            chat = chat + OTHER[20 * turn : 20 * turn + 20]
            shared, answer = shared_by(manager, chat)
            assert shared == before
            assert answer == expected_of(model, chat)
            before = len(chat) - 1
            chat = chat + answer


SETTINGS = {
    "small pieces": {"scheduler_type": "prefill_first", "max_batch_tokens": 100},
    "little memory": {"num_blocks": 150, "safety_margin": 0.0},
}


@BOTH
@pytest.mark.parametrize("settings", SETTINGS)
def test_requests_share_while_others_run(settings, name, models):
    """With little memory those of a hybrid lose it, and are read again."""
    model = models(name)
    prompts = [prompt for prompt, _ in list(AFTER_TEXT.values())[:6]]
    with sharing(model, SETTINGS[settings]) as manager:
        first = ask(manager, *prompts)
        assert ask(manager, *prompts) == first
        assert manager.shared_prompts().hits >= 6  # of the second six, at least
    assert first == [expected_of(model, prompt) for prompt in prompts]


@BOTH
def test_several_sequences_of_a_prompt_that_was_read(name, models):
    model = models(name)
    sampling = {"num_return_sequences": 3, "do_sample": True, "top_k": 1}
    cases = [(TEXT, 0), (TEXT, 512), (TEXT + OTHER[:1], 699)]  # the last but one is read, for all
    with sharing(model, **sampling) as manager:
        for prompt, shared in cases:
            before = manager.shared_prompts().tokens_shared
            request = manager.add_request(prompt)
            ids = [f"{request}{child}" for child in ("", "__child#0", "__child#1")]
            assert tokens_of(results(manager, ids)) == [expected_of(model, prompt)] * 3
            assert manager.shared_prompts().tokens_shared - before == shared


@pytest.mark.sample(1)
@BOTH
def test_snapshots_keep_to_their_bytes(name, models):
    model = models(name)
    with sharing(model) as manager:
        ask(manager, TEXT)
        counts = manager.shared_prompts()
        assert counts.snapshots == 3 and counts.evictions == 0
    with sharing(model, max_bytes=counts.nbytes) as manager:
        for prompt in (TEXT, OTHER, TEXT):
            assert shared_by(manager, prompt) == (0, expected_of(model, prompt))
        counts = manager.shared_prompts()
        assert counts.snapshots == 3 and counts.evictions == 6
    with sharing(model, max_bytes=0) as manager:
        ask(manager, TEXT, TEXT)
        assert manager.shared_prompts()[:5] == (0, 0, 0, 2 * len(TEXT), 0)
        assert manager.shared_prompts().nbytes == 0


@pytest.mark.sample(1)
@BOTH
def test_a_file_outlasts_the_engine(name, models, tmp_path):
    model = models(name)
    with sharing(model, folder=tmp_path) as manager:
        ask(manager, TEXT)
    twin = tiny_model(**MODELS[name])
    with sharing(twin, folder=tmp_path) as manager:
        assert shared_by(manager, TEXT + OTHER[:9]) == (699, expected_of(model, TEXT + OTHER[:9]))
        ask(manager, OTHER)
        assert len(list(tmp_path.glob("*/*"))) == manager.shared_prompts().snapshots == 7
    with sharing(twin, {"page_size": 256, "num_blocks": 20}, folder=tmp_path) as manager:
        assert shared_by(manager, OTHER) == (699, expected_of(model, OTHER))
    other_weights = tiny_model(seed=1, **MODELS[name])
    with sharing(other_weights, folder=tmp_path) as manager:
        assert shared_by(manager, TEXT) == (0, alone(other_weights, TEXT))
    assert len(list(tmp_path.iterdir())) == 2  # a folder for each


def test_what_goes_for_others_goes_from_the_folder(models, tmp_path):
    model = models("hybrid")
    with sharing(model, folder=tmp_path) as manager:
        ask(manager, TEXT)
        nbytes = manager.shared_prompts().nbytes
    before = set(tmp_path.glob("*/*"))
    with sharing(model, folder=tmp_path, max_bytes=nbytes) as manager:
        ask(manager, OTHER)
        assert manager.shared_prompts().evictions == 3
    after = set(tmp_path.glob("*/*"))
    assert len(after) == 3 and not after & before


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def change_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def is_another_model_s(path):
    tensors, metadata = read_file(path, [FILE_FORMAT], "")
    write_file(path, tensors, {**metadata, "model": "0" * 32})


def is_another_prompt_s(path):
    other = next(other for other in path.parent.iterdir() if other != path)
    path.write_bytes(other.read_bytes())


def is_something_else(path):
    path.write_text("not a snapshot")


def lacks_its_length(path):
    tensors, metadata = read_file(path, [FILE_FORMAT], "")
    write_file(path, tensors, {name: x for name, x in metadata.items() if name != "stop"})


def is_of_no_token(path):
    tensors, metadata = read_file(path, [FILE_FORMAT], "")
    write_file(path, tensors, {**metadata, "start": metadata["stop"]})


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (truncate, "not a whole safetensors file"),
        (change_a_byte, "is damaged"),
        (is_another_model_s, "of another model or prompt"),
        (is_another_prompt_s, "of another model or prompt"),
        (is_something_else, "not a whole safetensors file"),
        (lacks_its_length, "has no ['stop']"),
        (is_of_no_token, "must be of some tokens"),
    ],
)
def test_a_file_that_is_not_what_was_written_is_not_used(damage, why, models, tmp_path, caplog):
    model = models("gated")
    with sharing(model, folder=tmp_path) as manager:
        ask(manager, TEXT)
    key = Prompt(TEXT).key(699).hex()
    (path,) = tmp_path.glob(f"*/{key}.safetensors")
    damage(path)
    unfinished = path.with_name(f"{key}.safetensors.0123.unfinished")
    unfinished.write_bytes(path.read_bytes()[:100])  # by a process that was killed
    with sharing(model, folder=tmp_path) as manager:
        assert shared_by(manager, TEXT) == (512, expected_of(model, TEXT))
        assert shared_by(manager, TEXT) == (699, expected_of(model, TEXT))
    (warning,) = warnings_of(caplog)
    assert str(path) in warning and why in warning
    with sharing(model, folder=tmp_path) as manager:  # which has been written again
        assert shared_by(manager, TEXT)[0] == 699


def warnings_of(caplog) -> list[str]:
    ours = [r for r in caplog.records if r.name.startswith("hf_linear_attention")]
    return [r.getMessage() for r in ours if r.levelno == logging.WARNING]


def test_tensors_of_another_shape_are_not_used(models, tmp_path, caplog, monkeypatch):
    model = models("gated")
    with sharing(model, folder=tmp_path) as manager:
        ask(manager, TEXT)
    monkeypatch.setattr("hf_linear_attention.serving.request_memory.RequestMemory.fits", no_fit)
    with sharing(model, folder=tmp_path) as manager:
        assert shared_by(manager, TEXT) == (0, expected_of(model, TEXT))
    assert caplog.text.count("has other tensors than this model keeps") == 3


def test_what_is_not_a_number_in_a_file_is_not_used(models, tmp_path, caplog):
    model = models("gated")
    with sharing(model, folder=tmp_path) as manager:
        ask(manager, TEXT)
        layout = manager.prompts.memory.slots.layout
    for path in tmp_path.glob("*/*"):
        tensors, metadata = read_file(path, [FILE_FORMAT], "")
        for states in layout.views(tensors["linear_attention"].unsqueeze(0)).values():
            next(iter(states.values())).fill_(torch.nan)
        write_file(path, tensors, metadata)
    with sharing(model, folder=tmp_path) as manager:
        assert shared_by(manager, TEXT) == (0, expected_of(model, TEXT))
    assert caplog.text.count("has states that are not numbers") == 3
    with sharing(model, folder=tmp_path) as manager:  # they have been written again
        assert shared_by(manager, TEXT)[0] == 699


def no_fit(*args) -> bool:
    return False


def test_a_folder_that_can_t_be_written_ends_no_request(models, tmp_path, caplog, monkeypatch):
    model = models("gated")
    with sharing(model, folder=tmp_path) as manager:
        ask(manager, TEXT)
        (folder,) = tmp_path.iterdir()
        folder.rename(tmp_path / "moved")
        assert ask(manager, OTHER, TEXT) == [expected_of(model, OTHER), expected_of(model, TEXT)]
        assert shared_by(manager, OTHER)[0] == 699
    assert caplog.text.count("are not written to files any more") == 1


def test_what_a_killed_process_was_writing_goes_when_it_is_old(models, tmp_path):
    model = models("gated")
    with sharing(model, folder=tmp_path) as manager:
        ask(manager, TEXT)
    written = set(tmp_path.glob("*/*"))
    (path, *_) = written
    old, new = (path.with_name(f"{path.name}.{of}.unfinished") for of in ("killed", "writing"))
    for unfinished in (old, new):
        unfinished.write_bytes(path.read_bytes()[:100])
    os.utime(old, (time.time() - 2 * WRITING_TAKES,) * 2)
    with sharing(model, folder=tmp_path) as manager:
        assert shared_by(manager, TEXT)[0] == 699
    assert set(tmp_path.glob("*/*")) == {*written, new}


WITHOUT_BYTES = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
}


@pytest.mark.parametrize("buffer", WITHOUT_BYTES)
def test_a_model_that_has_no_fingerprint_is_served_without_files(buffer, tmp_path, caplog):
    model = tiny_model(**MODELS["gated"])
    model.register_buffer("more", WITHOUT_BYTES[buffer]())
    with sharing(model, folder=tmp_path) as manager:
        assert shared_by(manager, TEXT) == (0, alone(model, TEXT))
        assert shared_by(manager, TEXT) == (699, alone(model, TEXT))
    assert caplog.text.count("are not written to files any more") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", MODELS)
def test_what_is_not_a_number_is_not_kept(name, models, monkeypatch, tmp_path):
    model = models(name)
    with sharing(model, folder=tmp_path) as manager:
        memory = manager.prompts.memory
        read = memory.read

        def read_broken(request_id: str, *of) -> dict:
            (*_, states) = memory.slots.states.values()  # of one layer, as an overflow there leaves
            for part in states.values():
                part[memory.slots.slot_of(request_id)] = torch.nan
            return read(request_id, *of)

        monkeypatch.setattr(memory, "read", read_broken)
        assert results(manager, manager.add_requests([TEXT]))[0].error == NO_TOKEN
        assert manager.shared_prompts().snapshots == 0
        assert not list(tmp_path.glob("*/*"))
        monkeypatch.undo()
        assert shared_by(manager, TEXT) == (0, expected_of(model, TEXT))
        assert shared_by(manager, TEXT) == (699, expected_of(model, TEXT))


def test_weights_that_change_in_a_pause_share_nothing_with_those_before(tmp_path):
    model = tiny_model(**MODELS["gated"])
    with sharing(model, {"max_batch_tokens": 32}, folder=tmp_path) as manager:
        ask(manager, TEXT)
        manager.add_request(OTHER, request_id="meanwhile")  # is read by both
        wait_until(lambda: manager.shared_prompts().snapshots > 3)
        with manager.pause():
            with torch.no_grad():
                model.model.embed_tokens.weight.mul_(1.1)
        results(manager, ["meanwhile"])
        assert shared_by(manager, TEXT) == (0, alone(model, TEXT))
        assert shared_by(manager, TEXT) == (699, alone(model, TEXT))
        shared, answer = shared_by(manager, OTHER)
        assert answer == alone(model, OTHER)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.1)
    with sharing(model, folder=tmp_path) as manager:
        assert shared_by(manager, TEXT) == (0, alone(model, TEXT))


def test_pages_of_a_model_without_states_are_not_shared_after_a_pause():
    model = tiny_model(**VARIANTS["preset_softmax"])
    with sharing(model) as manager:
        assert results(manager, manager.add_requests([TEXT]))[0].generated_tokens
        with manager.pause(), torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.1)
        [answer] = results(manager, manager.add_requests([TEXT]))
        assert answer.generated_tokens == alone(model, TEXT)


def test_a_fingerprint_is_of_all_weights_and_of_the_config():
    fields = {"conv_kernel_size": 3, "normalizer": "rms_norm"}
    model = tiny_model(**fields)
    layout = SlotLayout.of_model(model)
    before = fingerprint_of(model, layout)
    assert fingerprint_of(tiny_model(**fields), layout) == before
    assert fingerprint_of(tiny_model(eos_token_id=3, **fields), layout) == before
    assert fingerprint_of(tiny_model(**fields, rms_norm_eps=1e-5), layout) != before
    assert fingerprint_of(tiny_model(dtype=torch.float32, **fields), layout) != before
    assert fingerprint_of(model, SlotLayout.of_model(tiny_model())) != before
    for _, weight in model.named_parameters():
        value = weight.data.flatten()[-1].clone()
        weight.data.view(-1)[-1] = torch.nextafter(value, value + 1)
        assert fingerprint_of(model, layout) != before
        weight.data.view(-1)[-1] = value
    assert fingerprint_of(model, layout) == before


def test_a_fingerprint_is_of_what_adapters_do():
    """Which of them count, and how much, is in no weight."""
    options = {"target_modules": "all-linear", "init_lora_weights": False}
    adapted = get_peft_model(tiny_model(), LoraConfig(**options))
    adapted.add_adapter("other", LoraConfig(**options))
    model = adapted.get_base_model()
    layout = SlotLayout.of_model(model)

    first = fingerprint_of(model, layout)
    adapted.set_adapter("other")
    other = fingerprint_of(model, layout)
    with adapted.disable_adapter():
        off = fingerprint_of(model, layout)
    assert fingerprint_of(model, layout) == other
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.set_scale("other", 0.5)
    weaker = fingerprint_of(model, layout)
    adapted.set_adapter("default")
    assert len({first, other, off, weaker}) == 4


def test_models_of_softmax_layers_only_share_pages(models):
    model = tiny_model(layer_types=["full_attention"] * 2, num_hidden_layers=2)
    with sharing(model, {"page_size": 256, "num_blocks": 20}) as manager:
        assert ask(manager, TEXT, TEXT) == [alone(model, TEXT)] * 2
        assert manager.shared_prompts().snapshots == 0


def test_the_environment_says_it_for_all_engines(models, tmp_path, monkeypatch):
    model = models("gated")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "made"))
    with engine(model) as manager:
        ask(manager, TEXT)
    assert len(list(tmp_path.glob("made/*/*.safetensors"))) == 3
    monkeypatch.setenv(BYTES_VARIABLE, "0")
    with engine(model) as manager:
        ask(manager, TEXT, TEXT)
        assert manager.shared_prompts().hits == 0
    monkeypatch.setenv(BYTES_VARIABLE, "1 GB")
    with pytest.raises(ValueError, match=f"{BYTES_VARIABLE} must be a number of bytes, got '1 GB'"):
        model.init_continuous_batching()


@pytest.mark.parametrize("wrong", [-1, 1.5, "1"])
def test_a_wrong_number_of_bytes_is_refused(wrong, models):
    with engine(models("gated")) as manager:
        with pytest.raises(RuntimeError, match="before start"):
            manager.share_prompts(0)
    with pytest.raises(ValueError, match=f"max_bytes must be None or an integer .* got {wrong!r}"):
        manager.share_prompts(wrong)


# ---- the store ----


def test_pieces_end_where_snapshots_are_taken():
    for length in (1, 2, 255, 256, 257, 258, 512, 513, 514, 700, 4095, 4096, 4097, 5000):
        position, stops = 0, []
        while position < length:
            position = next_stop(position, length)
            stops.append(position)
        assert stops[-1] == length
        expected = {*range(EVERY, length, EVERY), length - 1} if length > EVERY else set()
        if length >= 4096:  # of the last 256, and up to the multiple before them
            fine = range(FINE, length, FINE)
            expected |= {stop for stop in fine if stop > (length - 257) // 256 * 256}
        assert set(stops[:-1]) == expected
        assert {stop for stop in range(length + 2) if is_stop(stop, length)} == expected
        assert all(start_of(stop) in {0, *stops} for stop in expected)


@BOTH
def test_another_question_at_the_end_of_a_long_text_reads_little(name, models):
    model, text = models(name), random_ids(4500).tolist()
    with sharing(model, {"num_blocks": 700, "max_batch_tokens": 512}) as manager:
        ask(manager, text)
        prompt = text[:-20] + OTHER[:100]
        assert shared_by(manager, prompt) == (4480, expected_of(model, prompt))
        assert shared_by(manager, prompt[:-90] + TEXT[:9])[0] == 4480


def snapshot(prompt: Prompt, stop: int, nbytes: int) -> Snapshot:
    start = start_of(stop)
    tensors = {"x": torch.zeros(nbytes, dtype=torch.uint8)}
    return Snapshot(prompt.key(stop), prompt.key(start), start, stop, tensors)


@pytest.mark.parametrize("needs_all", [False, True])
def test_the_store_finds_the_longest_that_it_can_use(needs_all):
    """Against a list of all that were ever added, and by many random moves."""
    draw = random.Random(0)
    starts = [[draw.randrange(9) for _ in range(EVERY)] for _ in range(2)]
    store = SnapshotStore(max_bytes=100, needs_all=needs_all)
    ever: set[int] = set()  # where snapshots were taken
    for _ in range(300):
        tokens = [x for _ in range(draw.randrange(1, 5)) for x in draw.choice(starts)]
        prompt = Prompt(tokens[: len(tokens) - draw.randrange(3) * 50] + [9])
        length = len(prompt.tokens)
        limit = length - draw.randrange(1, 4)
        stops = sorted(stop for stop in ever if stop <= limit and prompt.key(stop) in store.held)
        for stop in stops:
            before = {*range(EVERY, stop, EVERY)}
            if not needs_all or before <= {*stops}:
                expected = stop
        found = store.longest(prompt, limit)
        assert [x.stop for x in found][-1:] == ([expected] if stops else [])
        if found and needs_all:
            assert [x.start for x in found] == [0, *(x.stop for x in found)][:-1]
        assert len(found) <= 1 or needs_all
        if found:
            last = list(store.held)[-len(found) :]  # used last of all
            assert last == [x.key for x in reversed(found)]
        for stop in range(length):
            if is_stop(stop, length) and store.wants(prompt, stop):
                ever.add(stop)
                gone = store.add([snapshot(prompt, stop, draw.randrange(1, 30))])
                assert not any(x.key in store.held for x in gone)
        assert store.nbytes == sum(x.nbytes for x in store.held.values()) <= 100
        tails = {key for keys in store.tails.values() for key in keys}
        assert tails == {key for key, x in store.held.items() if x.stop % EVERY != 0}
        if needs_all:
            assert all(x.start == 0 or x.parent in store.held for x in store.held.values())
