"""What a checkpoint's small files say of text: the chat template, and which ids end a generation."""

from __future__ import annotations

from pathlib import Path

from pegahpc.config import ConfigError
from pegahpc.gateway.template_pool import TemplateError, TemplateLost, TemplatePool
from pegahpc.gateway.tokenizer import TextCodec
from pegahpc.tokenizer_files import read_json

DEFAULT_TEMPLATE = "default"
MAX_BODY_BYTES = 1 << 20  # for a template that is only tried


def eos_token_ids(folder: Path, codec: TextCodec) -> tuple[int, ...]:
    """The ids that end a generation: generation_config.json's, else config.json's, and the tokenizer's own eos."""
    given = read_json(folder / "generation_config.json").get("eos_token_id")
    if given is None:
        given = read_json(folder / "config.json").get("eos_token_id")
    ids: set[int] = set(given) if isinstance(given, list) else {given} if isinstance(given, int) else set()
    own = codec.special_token_id("eos_token")
    return tuple(sorted(ids if own is None else ids | {own}))


def chat_templates(folder: Path, codec: TextCodec) -> dict[str, str]:
    """The checkpoint's templates by name; files go before tokenizer_config.json. A lone template is "default".

    **Source** transformers 5.24, `PreTrainedTokenizerBase._from_pretrained`.

    Raises:
        ConfigError: a template cannot be read, or is of no known form.
    """
    paths = {path.name.removesuffix(".jinja"): path for path in folder.glob("additional_chat_templates/*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        paths[DEFAULT_TEMPLATE] = folder / "chat_template.jinja"
    try:
        named = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {folder}: the chat template cannot be read: {error}") from None
    return named or _templates_in_config(codec.config.get("chat_template"), folder)


def chat_template(folder: Path, codec: TextCodec, *, max_body_bytes: int) -> TemplatePool | None:
    """Where the checkpoint's template is rendered, which starts no process yet; None: no chat model.

    Raises:
        ConfigError: a template cannot be read, or is of no known form.
    """
    source = chat_templates(folder, codec).get(DEFAULT_TEMPLATE)
    return None if source is None else TemplatePool(source, codec.special_tokens, max_body_bytes=max_body_bytes)


def warm_up(templates: TemplatePool) -> None:
    """Start the first process.

    Raises:
        ConfigError: the template does not compile within its bounds.
    """
    try:
        templates.warm_up()
    except (TemplateError, TemplateLost) as error:
        raise ConfigError(f"model.path: the chat template cannot be used: {error}") from None


def check_text_files(folder: Path) -> None:
    """Try all that the gateway reads of a checkpoint, so that it is refused before the weights are loaded.

    Raises:
        ConfigError: a tokenizer file or the chat template is missing or damaged.
    """
    codec = TextCodec(folder)
    eos_token_ids(folder, codec)
    templates = chat_template(folder, codec, max_body_bytes=MAX_BODY_BYTES)
    if templates is not None:
        try:
            warm_up(templates)
        finally:
            templates.close()


def _templates_in_config(given: object, folder: Path) -> dict[str, str]:
    """A text, or a list of `{"name": ..., "template": ...}`."""
    if given is None:
        return {}
    if isinstance(given, str):
        return {DEFAULT_TEMPLATE: given}
    try:
        return {_text(entry["name"]): _text(entry["template"]) for entry in given}  # type: ignore[attr-defined]
    except (LookupError, TypeError):
        raise ConfigError(f"model.path: {folder}/tokenizer_config.json: chat_template is of no known form") from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
