"""What a server says in the server's half of the fuzz: made from the run's seed and the input's number.

An answer begins as one a server could give, marked with the number, and is then changed, or its messages are
shuffled, doubled and mixed with others; in the login and before the first query likewise.
"""

from __future__ import annotations

from random import Random

from chaos import words as w
from chaos.fuzz_words import mark, noise, spoil
from chaos.script import SALT, Say, Session, Then, facts, greeting

_TAGS = ("SELECT 1", "INSERT 0 1", "SET", "RESET", "BEGIN", "COMMIT", "ROLLBACK", "DEALLOCATE", "DISCARD ALL",
         "DEALLOCATE ALL", "DISCARD TEMP", "LISTEN", "UNLISTEN", "CREATE TABLE", "SELECT INTO", "PREPARE",
         "DO", "CALL", "DECLARE CURSOR", "CLOSE CURSOR", "COPY 3", "MERGE 1", "", "x" * 3000, "é",
         "LOAD", "LOCK TABLE")
_CODES = ("42601", "22012", "26000", "0A000", "57014", "57P01", "57P03", "53300", "28P01", "28000", "3D000",
          "40001", "", "XXXXXX", "08P01", "25P02")
_TEXTS = ('prepared statement "pooler_0" does not exist', "no",
          'prepared statement "pooler_12" already exists', "é" * 30, "", "x" * 3000,
          "cached plan must not change result type", 'unrecognized configuration parameter "a.b"',
          "terminating connection due to administrator command")
_SEVERITIES = ("ERROR", "ERROR", "ERROR", "FATAL", "PANIC", "WARNING", "", "é")
_NAMES = ("client_encoding", "DateStyle", "TimeZone", "application_name", "search_path", "in_hot_standby", "",
          "standard_conforming_strings", "session_authorization", "is_superuser", "é", "server_version")
_VALUES = ("UTF8", "LATIN1", "nothing", "", "ISO, MDY", "on", "off", "'", "\\", "x" * 500, "Asia/Tokyo", "é")
_STATUSES = (b"I", b"I", b"I", b"I", b"T", b"E")
ENDS = (*(Then.GO_ON,) * 12, Then.FIN, Then.RST, Then.MUTE)
_QUESTION_ROWS = (
    ("work_mem", "9MB"), ("?16", None), ("?x", None), ("role", "none"), ("app.x", ""), ("app.é", "é"),
    (None, "x"), ("search_path", "a, b"), ("DateStyle", "ISO"), ("TimeZone", "'"), ("?" + "9" * 30, None))


def any_message(chance: Random, number: int) -> bytes:
    """One message of a server, of any kind."""
    match chance.randrange(22):
        case 0 | 1 | 2:
            return w.row([mark(number)] * chance.randint(0, 3))
        case 3 | 4:
            return w.complete(chance.choice(_TAGS))
        case 5 | 6:
            return fault(chance)
        case 7:
            return w.error("00000", chance.choice(_TEXTS), "NOTICE", b"N")
        case 8:
            return w.message(b"A", number.to_bytes(4) + b"ch\0" + mark(number).encode() + b"\0")
        case 9:
            return w.parameter(chance.choice(_NAMES), chance.choice(_VALUES))
        case 10:
            return w.columns(chance.randint(0, 3))
        case 11:
            return w.ready(chance.choice((*_STATUSES, b"?")))
        case 12:
            return w.message(chance.choice((b"1", b"2", b"3", b"n", b"s", b"I", b"c")))
        case 13:
            return w.message(b"t", b"\0\1\0\0\0\x17")
        case 14:
            return w.message(chance.choice((b"G", b"H", b"W")), b"\0\0\1\0\0")
        case 15:
            return w.message(b"d", mark(number).encode())
        case 16:
            return w.message(b"V", b"\0\0\0\1x")
        case 17:
            return chance.choice((
                w.backend_key(number), w.request(0), w.request(3), w.message(b"v", bytes(8))))
        case 18:
            return w.message(bytes([chance.randrange(256)]), noise(chance))
        case 19:
            return w.row([mark(number) + "x" * chance.choice((100, 5_000, 30_000))])
    return w.answered([[mark(number)]])


def fault(chance: Random) -> bytes:
    """An ErrorResponse, in one of ten without the fields it should have."""
    if chance.random() < 0.1:
        return w.message(b"E", chance.choice((
            b"", b"\0", b"SERROR", b"CX\0", b"M\xff\xfe\0\0", noise(chance))))
    return w.error(chance.choice(_CODES), chance.choice(_TEXTS), chance.choice(_SEVERITIES))


def in_service(seed: int, number: int, honest: bytes) -> Say:
    """The answer to what a client asked; `honest` is what it should be."""
    chance = Random(f"{seed}:said:{number}")
    kind = chance.randrange(26)
    then = Then.GO_ON
    if kind < 15:  # odd, but a server might
        honest = chance.choice((b"", *(_legal(chance, number) for _ in range(2)))) + honest[:-1] + (
            honest[-1:] if chance.random() < 0.8 else chance.choice(_STATUSES))
        return Say(honest)
    if kind < 17:
        honest = fault(chance) + w.ready(chance.choice(_STATUSES))
    elif kind < 20:
        honest = b"".join(any_message(chance, number) for _ in range(chance.randint(1, 5))) + chance.choice(
            (b"", w.ready(), honest))
    elif kind < 22:
        honest += chance.choice((w.ready(), honest, any_message(chance, number), noise(chance)))
    elif kind < 23:
        honest = chance.choice((b"", honest[: chance.randrange(len(honest) or 1)]))
        then = chance.choice(ENDS[12:])
    else:
        honest = spoil(chance, honest, 5)
    return Say(honest[:50_000], then if then is not Then.GO_ON else chance.choice(ENDS))


def _legal(chance: Random, number: int) -> bytes:
    """What may come at any time, or before any answer."""
    match chance.randrange(5):
        case 0:
            return w.error("00000", chance.choice(_TEXTS), "NOTICE", b"N")
        case 3:
            big = w.row([mark(number) + "x" * chance.choice((3_000, 70_000, 200_000))])
            return w.columns(1) + big * chance.randint(1, 3) + w.complete("SELECT 3")
        case 1:
            return w.message(b"A", number.to_bytes(4) + b"ch\0\0")
        case 2:
            return w.parameter(chance.choice(_NAMES), chance.choice(_VALUES))
    return w.columns(1) + w.row([mark(number)]) + w.complete(chance.choice(_TAGS))


def to_own_query(chance: Random, honest: bytes, *, once: bool) -> Say:
    """The answer to what the pooler asks or sets for itself on a session. `once`: never two whole ones."""
    match chance.randrange(7):
        case 0:
            rows = chance.choices(_QUESTION_ROWS, k=chance.randint(1, 4))
            return Say(w.answered([[*each] for each in rows]))
        case 1:
            return Say(fault(chance) + w.ready(chance.choice(_STATUSES)))
        case 2:
            said = [any_message(chance, 0) for _ in range(3)]
            return Say(b"".join(each for each in said if not once or w.ready()[:5] not in each) + w.ready())
        case 3:
            return Say(honest + chance.choice((w.ready(), noise(chance), *(() if once else (honest,)))))
        case 4:
            return Say(b"", chance.choice((Then.FIN, Then.RST)))
        case 5:
            return Say(fault(chance) + honest)
    return Say(spoil(chance, honest, 5))


def to_facts(chance: Random, session: Session) -> Say:
    """The answer to the question about a new session."""
    told = facts(session)
    match chance.randrange(5):
        case 0:
            odd = chance.choice(("", "x", None, "-1", "9" * 25, "é", "1.5", "::1%x"))
            told[chance.randrange(len(told))] = odd
            return Say(w.answered([told]))
        case 1:
            return Say(fault(chance) + chance.choice((w.ready(), b"")), chance.choice(ENDS))
        case 2:
            return Say(b"".join(any_message(chance, 0) for _ in range(3)) + w.answered([told]))
        case 3:
            return Say(b"", chance.choice((Then.FIN, Then.RST)))
    return Say(spoil(chance, w.answered([told]), 5))


def to_startup(chance: Random, session: Session) -> Say:
    """The first answer, or one in the middle of an authentication."""
    match chance.randrange(8):
        case 0:
            return Say(spoil(chance, greeting(session), 5), chance.choice(ENDS))
        case 1:
            return Say(fault(chance), chance.choice((Then.FIN, Then.FIN, Then.RST, Then.GO_ON)))
        case 2:
            code = chance.choice((0, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, -1))
            extra = chance.choice((b"", SALT, b"SCRAM-SHA-256\0\0", b"\0", noise(chance)))
            return Say(w.request(code, extra))
        case 3:
            rounds, salt = chance.choice((0, 1, 4096, 99_999_999)), chance.choice(("c2FsdA==", "*", ""))
            first = f"r={chance.choice(('x', ''))},s={salt},i={rounds}"
            return Say(w.request(10, b"SCRAM-SHA-256\0\0") + w.request(11, first.encode()) + w.request(
                12, chance.choice((b"v=", b"e=x", b"v=AAAA", b""))))
        case 4:
            return Say(b"".join(any_message(chance, 0) for _ in range(2)) + greeting(session))
        case 5:
            end = (w.parameter("a", "x" * 5_000), w.backend_key(1, noise(chance)), any_message(chance, 0))
            return Say(greeting(session)[:-6] + chance.choice(end) + w.ready())
        case 6:
            words = (b"Ecould not fork: x\n\0", b"HTTP/1.1 400\r\n\r\n", noise(chance))
            return Say(chance.choice(words), Then.FIN)
    return Say(b"", chance.choice((Then.FIN, Then.RST)))
