"""From what a user passes as configuration (dict, path or base64 text) to a plain dict."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from typing import Any

import hjson

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.runtime.config_report import show_value


def load_config(config: Mapping[str, Any] | str | os.PathLike[str]) -> tuple[dict[str, Any], str]:
    """Returns the configuration as a dict (a dict is returned itself, not copied) and the words that name its origin.

    config: dict, path of a JSON or hjson file (comments and trailing commas allowed), or urlsafe base64 of such a text.
    Raises: DeepSpeedConfigError for anything else, for text that is no JSON object and for duplicate keys."""
    if isinstance(config, dict):
        return config, "configuration"
    if isinstance(config, Mapping):
        return dict(config), "configuration"
    if not isinstance(config, (str, os.PathLike)):
        raise DeepSpeedConfigError(f"config is a {type(config).__name__} (expected a dict, a path, or urlsafe base64 "
                                   "of JSON text)")
    if os.path.isfile(config):
        origin = f"configuration file {os.fspath(config)}"
        with open(config, encoding="utf-8") as file:
            return parse_config_text(file.read(), origin), origin
    return parse_config_text(_decode(os.fspath(config)), "configuration in base64"), "configuration in base64"


def _decode(text: str) -> str:
    try:
        return base64.b64decode(text, altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        raise DeepSpeedConfigError(f"config is {show_value(text)}: there is no such file, and it is not urlsafe base64 "
                                   f"of JSON text either; check the path (working directory {os.getcwd()})") from None


def parse_config_text(text: str, origin: str) -> dict[str, Any]:
    """Returns the object that a JSON or hjson text describes.

    origin: words for error texts. Raises: DeepSpeedConfigError for a syntax error, duplicate keys, or another type."""
    duplicates: list[str] = []

    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        duplicates.extend(sorted({key for key in keys if keys.count(key) > 1}))
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=to_dict)
    except json.JSONDecodeError:
        duplicates.clear()
        try:
            value = hjson.loads(text, object_pairs_hook=to_dict)
        except hjson.HjsonDecodeError as error:
            raise DeepSpeedConfigError(f"{origin} is neither JSON nor hjson: {error}") from None
    if duplicates:
        raise DeepSpeedConfigError(f"{origin} has duplicate keys: {', '.join(duplicates)}; keep one of each")
    if not isinstance(value, dict):
        raise DeepSpeedConfigError(f"{origin} holds a {type(value).__name__} (expected a JSON object in braces)")
    return value
