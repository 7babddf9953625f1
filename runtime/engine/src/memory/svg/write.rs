//! Writes SVG elements from top to bottom.

use super::palette::{INK, MUTED, RULE};
use std::fmt::Write;

/// A document that grows downwards; `y` is where the next thing goes.
#[derive(Debug, Default)]
pub(super) struct Canvas {
    out: String,
    pub(super) y: f64,
}

/// A line of text.
pub(super) struct Text<'a> {
    x: f64,
    text: &'a str,
    size: f64,
    bold: bool,
    color: &'a str,
    room: f64,
}

impl<'a> Text<'a> {
    pub(super) fn new(x: f64, text: &'a str) -> Self {
        Self { x, text, size: 12.0, bold: false, color: INK, room: 1144.0 }
    }

    pub(super) fn size(self, size: f64) -> Self {
        Self { size, ..self }
    }

    pub(super) fn bold(self) -> Self {
        Self { bold: true, ..self }
    }

    pub(super) fn color(self, color: &'a str) -> Self {
        Self { color, ..self }
    }

    /// Cut so that it fits this many pixels.
    pub(super) fn within(self, room: f64) -> Self {
        Self { room: room.max(0.0), ..self }
    }
}

/// Pixels of a text, a little more than usual fonts take.
pub(super) fn text_width(text: &str, size: f64) -> f64 {
    let units = |c: char| match c {
        'i' | 'l' | 'j' | '.' | ',' | ':' | ';' | '\'' | '|' | '!' | ' ' => 0.29,
        't' | 'f' | 'r' | '(' | ')' | '/' | '-' => 0.35,
        'm' | 'w' | 'M' | 'W' => 0.86,
        c if c.is_ascii_uppercase() => 0.69,
        c if c.is_ascii() => 0.56,
        _ => 1.0,
    };
    text.chars().map(units).sum::<f64>() * size
}

/// As much of a text as fits.
pub(super) fn fitting(text: &str, size: f64, room: f64) -> String {
    if text_width(text, size) <= room {
        return text.to_owned();
    }
    let mut out = String::new();
    let mut width = size;
    for c in text.chars() {
        width += text_width(c.encode_utf8(&mut [0; 4]), size);
        if width > room {
            break;
        }
        out.push(c);
    }
    out + "…"
}

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\u{fffe}' | '\u{ffff}' => out.push('\u{fffd}'),
            c if c.is_control() => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

impl Canvas {
    fn add(&mut self, element: std::fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = self.out.write_fmt(element);
        self.out.push('\n');
    }

    pub(super) fn text(&mut self, text: &Text<'_>) {
        let shown = fitting(text.text, text.size, text.room);
        if shown.is_empty() {
            return;
        }
        let weight = if text.bold { r#" font-weight="bold""# } else { "" };
        let (x, y, size, color) = (text.x, self.y, text.size, text.color);
        self.add(format_args!(
            r#"<text x="{x:.1}" y="{y:.1}" font-size="{size}" fill="{color}"{weight}>{}</text>"#,
            escape(&shown)
        ));
    }

    /// A text in the middle of `x`.
    pub(super) fn label(&mut self, x: f64, y: f64, size: f64, text: &str) {
        self.add(format_args!(
            r#"<text x="{x:.1}" y="{y:.1}" font-size="{size}" fill="{INK}" text-anchor="middle" pointer-events="none">{}</text>"#,
            escape(text)
        ));
    }

    /// A small number beside what it counts.
    pub(super) fn number(&mut self, x: f64, y: f64, size: f64, text: &str) {
        self.add(format_args!(
            r#"<text x="{x:.1}" y="{y:.1}" font-size="{size}" fill="{MUTED}">{}</text>"#,
            escape(text)
        ));
    }

    #[expect(clippy::too_many_arguments, reason = "the attributes of the element")]
    pub(super) fn rect(
        &mut self,
        x: f64,
        y: f64,
        width: f64,
        height: f64,
        fill: &str,
        stroke: Option<&str>,
        tip: &str,
    ) {
        let stroke = stroke.map(|color| format!(r#" stroke="{color}""#)).unwrap_or_default();
        let width = width.max(0.0);
        let head = format!(
            r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.2}" height="{height:.1}" fill="{fill}"{stroke}"#
        );
        self.close(&head, "rect", tip);
    }

    /// A roof tile: straight above, where the course above covers it, round below.
    pub(super) fn tile(&mut self, x: f64, y: f64, w: f64, h: f64, fill: &str, tip: &str) {
        // Narrow ones keep a flat end, or they would look like needles.
        if w < 5.0 {
            return self.rect(x, y, w, h, fill, None, tip);
        }
        let r = (w / 2.0).min(h * 0.42);
        let (side, bottom, end) = (y + h - r, y + h, x + w);
        let head = format!(
            r#"<path d="M{x:.1} {y:.1}H{end:.1}V{side:.1}Q{end:.1} {bottom:.1} {:.1} {bottom:.1}H{:.1}Q{x:.1} {bottom:.1} {x:.1} {side:.1}Z" fill="{fill}" stroke="{INK}" stroke-opacity="0.35" stroke-width="0.7""#,
            end - r,
            x + r
        );
        self.close(&head, "path", tip);
    }

    pub(super) fn line(&mut self, x1: f64, y1: f64, x2: f64, y2: f64, color: &str, width: f64) {
        self.add(format_args!(
            r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" stroke="{color}" stroke-width="{width}"/>"#
        ));
    }

    fn close(&mut self, head: &str, name: &str, tip: &str) {
        if tip.is_empty() {
            self.add(format_args!("{head}/>"));
        } else {
            self.add(format_args!("{head}><title>{}</title></{name}>", escape(tip)));
        }
    }

    /// A place to which [`Canvas::panel`] can go back.
    pub(super) fn mark(&self) -> usize {
        self.out.len()
    }

    /// A white card behind everything since `mark`.
    pub(super) fn panel(&mut self, mark: usize, x: f64, y: f64, width: f64, height: f64) {
        let card = format!(
            r##"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" rx="10" fill="#ffffff" stroke="{RULE}"/>
"##
        );
        self.out.insert_str(mark.min(self.out.len()), &card);
        self.y += 8.0;
    }

    /// The document.
    pub(super) fn finish(self, width: f64, margin: f64) -> String {
        let height = self.y + margin;
        format!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0}" viewBox="0 0 {width} {height:.0}" font-family="Inter, 'Segoe UI', 'Helvetica Neue', Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif">
<defs><pattern id="others" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="6" height="6" fill="#efeae2"/><rect width="2" height="6" fill="#d8d0c4"/></pattern></defs>
<rect width="100%" height="100%" fill="#faf7f2"/>
{}</svg>
"##,
            self.out
        )
    }
}
