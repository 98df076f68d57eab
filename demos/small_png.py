"""A picture of a page in few bytes: 256 colours, more than text and lines need. The browser finds them."""

import base64
import struct
import zlib

from playwright.sync_api import Page

_TO_PALETTE = """async source => {
    const bitmap = await createImageBitmap(await (await fetch(source)).blob());
    const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
    const context = canvas.getContext("2d");
    context.drawImage(bitmap, 0, 0);
    const rgba = context.getImageData(0, 0, bitmap.width, bitmap.height).data;
    const counts = new Map();
    const colorAt = at => (rgba[at] << 16) | (rgba[at + 1] << 8) | rgba[at + 2];
    for (let at = 0; at < rgba.length; at += 4) counts.set(colorAt(at), (counts.get(colorAt(at)) ?? 0) + 1);
    const byCount = [...counts].sort((one, other) => other[1] - one[1]).map(([color]) => color);
    const palette = byCount.splice(0, 96);
    const alike = new Set();  // of the rest one of each shade, so that thin lines keep their hue
    for (const color of byCount) {
        if (palette.length < 256 && !alike.has(color & 0xf0f0f0)) palette.push(color);
        alike.add(color & 0xf0f0f0);
    }
    const known = new Map(palette.map((color, place) => [color, place]));
    const parts = color => [color >> 16, (color >> 8) & 255, color & 255];
    const nearest = color => {
        const wanted = parts(color);
        const far = other => parts(other).reduce((sum, part, at) => sum + (part - wanted[at]) ** 2, 0);
        return palette.reduce((best, other, place) => (far(other) < far(palette[best]) ? place : best), 0);
    };
    const pixels = new Uint8Array(rgba.length / 4);
    for (let at = 0; at < pixels.length; at += 1) {
        const color = colorAt(4 * at);
        if (!known.has(color)) known.set(color, nearest(color));
        pixels[at] = known.get(color);
    }
    let text = "";
    for (let at = 0; at < pixels.length; at += 32768) text += String.fromCharCode(...pixels.subarray(at, at + 32768));
    return {width: bitmap.width, height: bitmap.height, palette: palette.flatMap(parts), pixels: btoa(text)};
}"""


def small_png(page: Page, png: bytes) -> bytes:
    """The same picture. `page` lends its browser, and may be any that has no content policy."""
    found = page.evaluate(_TO_PALETTE, f"data:image/png;base64,{base64.b64encode(png).decode()}")
    width, height, pixels = found["width"], found["height"], base64.b64decode(found["pixels"])
    rows = b"".join(b"\0" + pixels[at : at + width] for at in range(0, width * height, width))
    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits a pixel, by palette
    chunks = ((b"IHDR", head), (b"PLTE", bytes(found["palette"])), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
