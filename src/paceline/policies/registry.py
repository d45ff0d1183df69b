"""Make policies from names with options.

Examples: `r2sp`, `dssp:low=3,high=15`, `groups:inner=(bsp:fraction=0.75)`, `my.module:Class`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Iterable

from paceline.policies.contract import Policy
from paceline.policies.options import Option, PolicyError, options_of

_KNOWN: dict[str, str] = {
    "bsp": "paceline.policies.bsp:BSP",
    "ksync": "paceline.policies.ksync:KSync",
    "kbatch": "paceline.policies.ksync:KBatch",
    "asp": "paceline.policies.asp:ASP",
    "ssp": "paceline.policies.ssp:SSP",
    "dssp": "paceline.policies.dssp:DSSP",
    "r2sp": "paceline.policies.r2sp:R2SP",
    "safa": "paceline.policies.safa:SAFA",
    "fedbuff": "paceline.policies.fedbuff:FedBuff",
    "filtered": "paceline.policies.filtered:Filtered",
    "fl-r2sp": "paceline.policies.fl_r2sp:FLR2SP",
    "groups": "paceline.policies.groups:Groups",
}


def register(name: str, path: str) -> None:
    """Register `name` for the policy at `module:Class`. The module is imported at first use."""
    if not name.isidentifier():
        raise PolicyError(f"A policy's name must be a plain word, not {name!r}.")
    _KNOWN[name] = path


def packages() -> tuple[str, ...]:
    """Return the packages of all registered policies, each with a trailing dot."""
    modules = {path.partition(":")[0] for path in _KNOWN.values()}
    return tuple(sorted({f"{name.rpartition('.')[0]}." for name in modules if "." in name}))


def names() -> list[str]:
    """Return the names of all registered policies."""
    return list(_KNOWN)


def policy_class(name: str) -> type[Policy]:
    """Return the class of the policy with this name."""
    if name in _KNOWN:
        path = _KNOWN[name]
    elif ":" in name or "." in name:
        path = name
    else:
        close = difflib.get_close_matches(name, _KNOWN, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise PolicyError(f"There is no policy {name!r}.{hint} Known policies: {', '.join(_KNOWN)}.")
    module_name, _, class_name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise PolicyError(f"{path!r} cannot be loaded as a policy: {error}.") from None
    if not (isinstance(found, type) and issubclass(found, Policy)) or inspect.isabstract(found):
        raise PolicyError(f"{path!r} is not a policy: it must be a concrete subclass of paceline.policies.Policy.")
    return found


def policy_options(name: str) -> dict[str, Option]:
    """Return the options of the policy with this name."""
    return options_of(policy_class(name).__init__)


def make(spec: str) -> Policy:
    """Make the policy that a spec describes: a name, and options after a colon."""
    name, options = split_spec(spec)
    cls = policy_class(name)
    known = options_of(cls.__init__)
    values = {}
    for key, text in options:
        if key not in known:
            offered = ", ".join(known) if known else "none"
            close = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise PolicyError(f"{name} has no option {key!r}.{hint} Its options: {offered}.")
        if key in values:
            raise PolicyError(f"{name}: {key} is given twice.")
        try:
            values[key] = known[key].parse(text)
        except ValueError:
            values[key] = None
        if not known[key].accepts(values[key]):
            raise PolicyError(f"{name}: {key} must be {known[key].expected}, not {text!r}.")
    for key, option in known.items():
        if option.default is inspect.Parameter.empty and key not in values:
            raise PolicyError(f"{name}: {key} is missing; it must be {option.expected}.")
    return cls(**values)


def split_spec(spec: str) -> tuple[str, list[tuple[str, str]]]:
    """Split a spec into its name and its options, as text. `module:Class` is a name: `a.b:C:x=1` has one option."""
    name, _, rest = spec.strip().partition(":")
    if rest and "=" not in rest.partition(":")[0] and name not in _KNOWN:
        class_name, _, rest = rest.partition(":")
        name = f"{name}:{class_name}"
    if not name:
        raise PolicyError("The policy's name is missing; write for example 'ssp:staleness=3'.")
    options = []
    for part in _split(rest) if rest else []:
        key, equals, value = part.partition("=")
        if not (key.strip() and equals):
            raise PolicyError(f"{name}: write options as key=value, not {part!r}.")
        value = value.strip()
        if value.startswith("(") and value.endswith(")"):
            value = value[1:-1]
        options.append((key.strip(), value))
    return name, options


def with_mean_weights(spec: str) -> str:
    """Return the spec of the same policy for a real job: weights=mean replaces a default of weights=sum.

    A spec that names its weights keeps them. A policy that is an option of another one is treated alike.
    """
    name, options = split_spec(spec)
    known, given = policy_options(name), {key for key, _ in options}
    nested = {key for key, option in known.items() if option.takes(Policy)}
    explicit = [(key, with_mean_weights(text) if key in nested else text) for key, text in options]
    for key, option in known.items():
        if key in given:
            continue
        if key == "weights" and option.default == "sum" and option.accepts("mean"):
            explicit.append((key, "mean"))
        elif key in nested and isinstance(option.default, str):
            text = with_mean_weights(option.default)
            explicit += [(key, text)] if text != option.default else []
    if explicit == options:
        return spec
    return f"{name}:" + ",".join(f"{key}={_in_parentheses(text)}" for key, text in explicit)


def without_mean_weights(spec: str) -> str:
    """Return the spec as a user of a real job would write it: without weights=mean where that is the default.

    A spec of an unknown policy is returned as it is.
    """
    try:
        name, options = split_spec(spec)
        nested = {key for key, option in policy_options(name).items() if option.takes(Policy)}
        kept = [(key, without_mean_weights(text) if key in nested else text) for key, text in options]
        kept = [each for each in kept if each != ("weights", "mean")]
        short = f"{name}:" + ",".join(f"{key}={_in_parentheses(text)}" for key, text in kept) if kept else name
        return short if with_mean_weights(short) == with_mean_weights(spec) else spec
    except PolicyError:
        return spec


def _in_parentheses(text: str) -> str:
    """Return the value of an option as it is written in a spec: in parentheses if it has options of its own."""
    return f"({text})" if set(text) & set(":,()") else text


def is_same_policy(saved: str, current: str) -> bool:
    """Return whether a job's policy is that of a checkpoint, which may be written without its weights.

    Names from the checkpoint are looked up only if the job's own spec has them: a checkpoint cannot import a module.
    """
    if saved == current:
        return True
    words, own = (set(re.findall(r"[\w.-]+", text)) for text in (saved, current))
    try:
        return words <= own and with_mean_weights(saved) == current
    except PolicyError:
        return False


def split_list(texts: Iterable[str]) -> list[str]:
    """Split comma-separated lists into specs. A `key=value` after a comma belongs to the policy before it."""
    specs: list[str] = []
    for text in texts:
        first = True
        for part in _split(text):
            head = part.partition("(")[0]
            if "=" in head and ":" not in head.partition("=")[0]:
                if first:
                    raise PolicyError(f"The option {part!r} must come after the name of a policy.")
                specs[-1] += ("," if "=" in specs[-1] else ":") + part
            else:
                specs.append(part)
            first = False
    return specs


def _split(text: str) -> list[str]:
    """Split a text at the commas outside parentheses."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth < 0:
            break
        if character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    if depth != 0:
        raise PolicyError(f"The parentheses in {text!r} do not match.")
    parts.append(text[start:])
    parts = [part.strip() for part in parts]
    if not all(parts):
        raise PolicyError(f"The list {text!r} has an empty item.")
    return parts
