"""Addresses and sockets."""

from __future__ import annotations

import socket

import pytest

from eagle_exporter.server.listener import BusyAddressError, address_of, bind, parse_address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.0.0.0:10077", ("0.0.0.0", 10077)),
        (":10077", ("", 10077)),
        ("[::]:10077", ("::", 10077)),
        ("[::1]:1", ("::1", 1)),
        ("localhost:0", ("localhost", 0)),
        (" node-a.example:65535 ", ("node-a.example", 65535)),
    ],
)
def test_an_address_is_host_and_port(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize(
    "text", ["", "10077", "localhost", "localhost:", "localhost:http", "::1:80", "a:65536", "a:-1", "a:²"]
)
def test_anything_else_is_refused_with_what_is_expected(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT, \[IPV6\]:PORT or :PORT"):
        parse_address(text)


def test_all_addresses_are_bound_or_none() -> None:
    (taken,) = bind(["127.0.0.1:0"])
    with taken:
        free = f"127.0.0.2:{taken.getsockname()[1]}"
        with pytest.raises(BusyAddressError) as caught:
            bind([free, address_of(taken)])
        assert caught.value.address == address_of(taken)
        # What was bound before the failure is free again.
        (again,) = bind([free])
        again.close()


def test_ipv6_addresses_and_every_address_work() -> None:
    for text in ("[::1]:0", "[::]:0", ":0"):
        (bound,) = bind([text])
        with bound:
            port = bound.getsockname()[1]
            for host in ["::1"] if text == "[::1]:0" else ["127.0.0.1", "::1"]:
                socket.create_connection((host, port), 2).close()
