"""Pictures that tests take of pages, put together as the documents show them."""

from PIL import Image

GAP, GROUND = 20, "#808080"
SHEETS = {  # picture -> those that it is made of, in rows
    "panel-plan": [[f"panel-plan-{language}" for language in ("en", "fr", "ja", "zh")]],
    "report": [["report-canvas", "report-vue"]],
}


def put_together(folder):
    """Makes each sheet whose pictures are all there."""
    for name, rows in SHEETS.items():
        files = [[folder / f"{one}.png" for one in row] for row in rows]
        if all(file.exists() for row in files for file in row):
            sheet([[Image.open(file) for file in row] for row in files]).save(folder / f"{name}.png")


def sheet(rows):
    """Rows of pictures, each column as wide as its widest."""
    widths = [max(picture.width for picture in column) for column in zip(*rows, strict=True)]
    heights = [max(picture.height for picture in row) for row in rows]
    made = Image.new(
        "RGB", (sum(widths) + GAP * (len(widths) - 1), sum(heights) + GAP * (len(heights) - 1)), GROUND
    )
    for row, pictures in enumerate(rows):
        for column, picture in enumerate(pictures):
            made.paste(
                picture.convert("RGB"), (sum(widths[:column]) + GAP * column, sum(heights[:row]) + GAP * row)
            )
    return made
