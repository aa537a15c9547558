"""Secrets, told by the words of a name and by the form of a value: for engines, reports, job files and logs."""

import re

HIDDEN = "(hidden)"
# Parts of a name that are enough wherever they stand, also in `HFSECRET` or `wandbApiKey`
ANYWHERE = re.compile(
    r"secret|passw|passphrase|credential|(api|access|private|signing|encryption)_?key"
)
WORDS = {
    "auth",
    "authorization",
    "bearer",
    "cookie",
    "cookies",
    "cred",
    "creds",
    "dsn",
    "jwt",
    "oauth",
    "oauth2",
}
# Words that make a secret at the end of a name only: `num_key_value_heads`, `eos_token_id` and `PASS_AT_K` have none
LAST_WORDS = {"key", "pass", "pat", "pwd", "token"}
LAST = re.compile(r"(?<!by)pass$|apikey$|token$")  # of one word: `SSHPASS`, `HFTOKEN`
# Ends of names of a tokenizer's tokens, which are not of an account
SPECIAL_TOKENS = tuple(f"_{kind}_token" for kind in (
    "bos", "eos", "pad", "unk", "sep", "cls", "mask", "image", "video", "audio", "boi", "eoi", "special",
    "start", "stop",
))  # fmt: skip
WORKING_FOLDER = "pwd"  # of a shell
# Tokens by their form: Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS, Google, a signed token, a private key
FORMS = re.compile(
    r"\b(?:hf_|api_org_|sk-|gh[opsu]_|github_pat_|glpat-|xox[abprs]-)[A-Za-z0-9_-]{8,}|\bA[KS]IA[A-Z0-9]{12,}"
    r"|\bAIza[A-Za-z0-9_-]{30,}|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*"
)
IN_URL = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")  # user and password


def is_secret_name(name: str) -> bool:
    """Return whether a variable, a setting or a flag of this name holds a secret."""
    snake = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    words = re.findall(r"[a-z0-9]+", snake.lower())
    whole = "_".join(words)
    if whole in ("", WORKING_FOLDER) or f"_{whole}".endswith(SPECIAL_TOKENS):
        return False
    if ANYWHERE.search(whole) or WORDS.intersection(words):
        return True
    return words[-1] in LAST_WORDS or bool(LAST.search(words[-1]))


def has_secret_form(text: str) -> bool:
    """Return whether a text has a token of a known form, or an address with a password."""
    return bool(FORMS.search(text) or IN_URL.search(text))


def without_forms(text: str) -> str:
    """Return a text without tokens of a known form and without passwords in addresses."""
    return FORMS.sub(HIDDEN, IN_URL.sub(HIDDEN, text))
