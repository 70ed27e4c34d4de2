"""Formats of strings that are enforced, each as a pattern of which every text is valid. xgrammar's own rules take leading
zeros, the 31st of February, and backslashes that no escape follows.
"""

_NOT_ZERO = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # years; Python knows no year 0
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_DAYS = "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"(?:{_NOT_ZERO}-{_DAYS}|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR})"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = "[0-9A-Fa-f]{1,4}"
_LABEL = "[0-9A-Za-z](?:[0-9A-Za-z-]{0,61}[0-9A-Za-z])?"
_SHORT_LABEL = "[0-9A-Za-z](?:[0-9A-Za-z-]{0,22}[0-9A-Za-z])?"
# At most 253 characters: 3 labels of 63, or 10 of 24.
_HOST = rf"(?:{_LABEL}(?:\.{_LABEL}){{0,2}}|{_SHORT_LABEL}(?:\.{_SHORT_LABEL}){{3,9}})"
_MAIL_HOST = rf"(?:{_LABEL}(?:\.{_LABEL})?|{_SHORT_LABEL}(?:\.{_SHORT_LABEL}){{2,6}})"
_ATOM = "[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": rf"(?:{_ATOM}{{1,64}}|{_ATOM}{{1,20}}(?:\.{_ATOM}{{1,20}}){{1,2}})@{_MAIL_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "ipv6": "|".join(
        [f"{_HEX}(?::{_HEX}){{7}}", f"(?:{_HEX}:){{7}}:"]
        + [f"{':'.join([_HEX] * num)}::(?:{_HEX}(?::{_HEX}){{0,{6 - num}}})?" for num in range(7)]
    ),
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
}
# Characters of the shortest and of the longest text that the pattern takes.
LENGTHS = {
    "date": (10, 10),
    "time": (9, 24),
    "date-time": (20, 35),
    "email": (3, 239),
    "hostname": (1, 249),
    "ipv4": (7, 15),
    "ipv6": (2, 39),
    "uuid": (36, 36),
}
