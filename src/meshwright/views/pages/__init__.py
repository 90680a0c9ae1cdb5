"""Offline pages: sections of charts, tables, timelines and drawings, written as one file that loads nothing."""

from meshwright.views.pages.blocks import (
    Axis,
    Bar,
    Bars,
    BarScale,
    Block,
    Cell,
    Chart,
    Code,
    Column,
    Facts,
    Figure,
    Figures,
    Finding,
    Findings,
    Grid,
    Inspector,
    Item,
    Mark,
    Matrix,
    Series,
    Table,
    Text,
    Timeline,
    Tone,
    Unit,
    WorkKind,
    WorkSpans,
)
from meshwright.views.pages.page import Live, Page, Section, document, frame, inline

__all__ = [
    "Axis", "Bar", "BarScale", "Bars", "Block", "Cell", "Chart", "Code", "Column", "Facts", "Figure", "Figures",
    "Finding", "Findings", "Grid", "Inspector", "Item", "Live", "Mark", "Matrix", "Page", "Section", "Series",
    "Table", "Text", "Timeline", "Tone", "Unit", "WorkKind", "WorkSpans", "document", "frame", "inline",
]  # fmt: skip
