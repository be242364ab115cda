"""What a checkpoint says of its tokens is understood as transformers understands it, and each bos is put once."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from pegahpc.config import ConfigError
from pegahpc.gateway.template_messages import Chat
from pegahpc.gateway.templates import ChatTemplate
from pegahpc.gateway.text_files import chat_templates, eos_token_ids
from pegahpc.gateway.tokenizer import TextCodec
from pegahpc.vocabulary import read_vocabulary
from tests.gateway.conftest import TINY, Serve

os.environ["HF_HUB_OFFLINE"] = "1"

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}<|assistant|>"
)
TEXTS = ["hi", "", " two  words ", "世界 👩‍👩‍👧‍👦 e\u0301", "a<|end|>b", "x <extra> y<EXTRA>", "née  <image>\n\n"]
Messages = list[dict[str, str]]


def byte_level(folder: Path, **config: Any) -> None:
    """The shipped vocabulary, with a bos before every text."""
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 1)])
    write(folder, tokenizer, {"bos_token": "<|bos|>", "eos_token": "<|end|>", **config})


def sentencepiece_like(folder: Path, **config: Any) -> None:
    """Llama's kind: "▁" for spaces, byte tokens for what the vocabulary lacks."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abehiorstw,", "世", "▁t", "▁tw"]
    vocab = {word: idx for idx, word in enumerate(words)}
    merges = [("▁", "t"), ("▁t", "w")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words[:3]])
    write(folder, tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **config})


def write(folder: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_bytes((TINY / "config.json").read_bytes())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def chat_tokens(folder: Path, messages: Messages) -> list[int]:
    codec = TextCodec(folder)
    template = ChatTemplate(chat_templates(folder, codec)["default"], codec.special_tokens)
    return codec.encode(template.render(Chat(messages=messages)), add_special_tokens=False)


MAKERS = pytest.mark.parametrize("make", [byte_level, sentencepiece_like])


@MAKERS
def test_a_chat_has_the_tokens_of_transformers_and_one_bos_though_template_and_tokenizer_both_write_it(
    make: Callable[..., None], tmp_path: Path
) -> None:
    make(tmp_path)
    their = theirs(tmp_path)
    for text in TEXTS:
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
        ids = chat_tokens(tmp_path, messages)
        assert ids == their.apply_chat_template(messages, return_dict=False)
        assert ids[0] == their.bos_token_id and ids.count(their.bos_token_id) == 1


@MAKERS
def test_a_text_has_the_tokens_of_transformers_and_one_bos_even_if_it_begins_with_it(
    make: Callable[..., None], tmp_path: Path
) -> None:
    make(tmp_path)
    codec, their = TextCodec(tmp_path), theirs(tmp_path)
    for text in TEXTS:
        assert codec.encode(text, add_special_tokens=True) == their(text)["input_ids"]
    bos, end = their.bos_token, their.eos_token
    ids = codec.encode(f"{bos}hi{end}", add_special_tokens=True)
    assert their(f"{bos}hi{end}")["input_ids"] == [their.bos_token_id, *ids]  # who sends a rendered chat gets two there
    assert ids.count(their.bos_token_id) == 1 and ids[-1] == their.eos_token_id
    assert codec.encode(f"{bos}{bos}", add_special_tokens=True) == [their.bos_token_id] * 2  # as it was written


def test_a_bos_that_only_the_config_asks_for_is_put_once(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<|bos|>", "add_bos_token": true}')
    codec = TextCodec(tmp_path)
    plain = Tokenizer.from_file(str(TINY / "tokenizer.json")).encode("hi").ids
    assert codec.encode("hi", add_special_tokens=True) == [1, *plain]
    assert codec.encode("<|bos|>hi", add_special_tokens=True) == [1, *plain]
    assert codec.encode("hi", add_special_tokens=False) == plain


@MAKERS
def test_a_control_token_in_a_clients_text_is_that_token_as_in_transformers(
    make: Callable[..., None], tmp_path: Path
) -> None:
    make(tmp_path)
    their = theirs(tmp_path)
    messages = [{"role": "user", "content": f"a{their.eos_token}b"}]
    ids = chat_tokens(tmp_path, messages)
    assert ids == their.apply_chat_template(messages, return_dict=False)
    assert ids.count(their.eos_token_id) == 2


TOKEN = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "a token that only the config has": {"added_tokens_decoder": {"9999": {"content": "<extra>", **TOKEN}}},
    "a token that is no special one": {
        "added_tokens_decoder": {"9999": {"content": "<extra>", **TOKEN, "special": False, "normalized": True}}
    },
    "a token that takes the blanks around it": {
        "added_tokens_decoder": {"9999": {"content": "<extra>", **TOKEN, "lstrip": True, "rstrip": True}}
    },
    "two tokens, by their ids": {
        "added_tokens_decoder": {"20001": {"content": "<EXTRA>", **TOKEN}, "9999": {"content": "<extra>", **TOKEN}}
    },
    "a named token that nobody has": {"pad_token": "<extra>"},
    "a named token with its flags": {"pad_token": {"content": "<extra>", "__type": "AddedToken", **TOKEN}},
    "a list of more": {"extra_special_tokens": ["<extra>", "<EXTRA>"]},
    "a list of more, by the older key": {
        "additional_special_tokens": ["<extra>", {"content": "<EXTRA>", "__type": "AddedToken", **TOKEN}]
    },
    "names of the model's own": {"image_token": "<image>", "extra_special_tokens": {"audio_token": "<extra>"}},
    "control tokens that are text in a text": {"split_special_tokens": True},
}


@MAKERS
@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_tokens_that_the_config_adds_are_those_of_transformers(
    make: Callable[..., None], config: dict[str, Any], tmp_path: Path
) -> None:
    make(tmp_path, **config)
    codec, their = TextCodec(tmp_path), theirs(tmp_path)
    assert codec.special_tokens == their.special_tokens_map
    assert codec.vocab_size == len(their)
    for text in TEXTS:
        ids = codec.encode(text, add_special_tokens=False)
        assert ids == their.encode(text, add_special_tokens=False), text
        detokenizer = codec.detokenizer()
        assert detokenizer.feed(ids) + detokenizer.finish() == their.decode(ids, skip_special_tokens=True)


def test_an_older_checkpoint_names_its_tokens_in_a_file_of_their_own(tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<extra>", "lstrip": true}}')
    codec, their = TextCodec(tmp_path), theirs(tmp_path)
    assert codec.special_tokens == their.special_tokens_map
    assert codec.special_token_id("eos_token") == their.eos_token_id
    assert codec.encode("a <extra>", add_special_tokens=False) == their.encode("a <extra>", add_special_tokens=False)


@pytest.mark.parametrize(
    "config", [{"added_tokens_decoder": {"x": {}}}, {"added_tokens_decoder": [1]}, {"pad_token": 7}, {"pad_token": {}}]
)
def test_a_config_of_no_known_form_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    byte_level(tmp_path, **config)
    with pytest.raises(ConfigError, match=r"model\.path: .*tokenizer_config\.json is damaged"):
        TextCodec(tmp_path)


def test_gateway_and_engines_agree_on_which_ids_have_a_token(tmp_path: Path) -> None:
    byte_level(tmp_path, added_tokens_decoder={"3072": {"content": "<extra>", **TOKEN}})
    assert TextCodec(tmp_path).token_ids == frozenset(range(3073))
    assert read_vocabulary(tmp_path, 3080).suppressed == tuple(range(3073, 3080))


async def test_ids_of_padding_are_refused_by_name_and_show_nothing(serve: Serve, tmp_path: Path) -> None:
    byte_level(tmp_path)
    config = json.loads((TINY / "config.json").read_text()) | {"vocab_size": 3080}
    (tmp_path / "config.json").write_text(json.dumps(config))
    async with serve(f"model.path={tmp_path}") as served:
        refused: list[tuple[dict[str, Any], str]] = [
            ({"prompt": [5, 3079]}, "prompt"),
            ({"prompt": [[5], [3072]]}, "prompt[1]"),
            ({"stop_token_ids": [3072]}, "stop_token_ids"),
            ({"logit_bias": {"3072": 1}}, "logit_bias"),
        ]
        for fields, param in refused:
            status, body = await served.complete(**fields)
            assert (status, body["error"]["param"]) == (400, param)
            assert "has no token in this model's tokenizer" in body["error"]["message"]
        assert served.engine.requests == []
        assert (await served.complete(prompt=[5, 3071]))[0] == 200
    codec = TextCodec(tmp_path)
    ids = codec.encode("é世", add_special_tokens=False)
    detokenizer = codec.detokenizer()
    assert "".join(detokenizer.feed([token, 3079]) for token in ids) + detokenizer.finish() == "é世"


async def test_a_text_that_needs_a_token_which_the_model_does_not_have_is_refused(serve: Serve, tmp_path: Path) -> None:
    byte_level(tmp_path, added_tokens_decoder={"3072": {"content": "<extra>", **TOKEN}})  # the model ends at 3071
    async with serve(f"model.path={tmp_path}") as served:
        status, body = await served.complete(prompt="a <extra> b")
        assert (status, body["error"]["param"]) == (400, "prompt")
        assert "token id 3072 is outside of the vocabulary of 3072" in body["error"]["message"]
        status, body = await served.chat(messages=[{"role": "user", "content": "<extra>"}])
        assert (status, body["error"]["param"]) == (400, "messages")


def test_eos_ids_are_a_number_or_a_list_and_the_tokenizers_own(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    assert eos_token_ids(tmp_path, TextCodec(tmp_path)) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert eos_token_ids(tmp_path, TextCodec(tmp_path)) == (9,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|end|>"}}')
    assert eos_token_ids(tmp_path, TextCodec(tmp_path)) == (2, 7, 8)
