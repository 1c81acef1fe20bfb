//! Drawing on pixels, with letters of fixed width.

use std::convert::Infallible;

use embedded_graphics::Drawable;
use embedded_graphics::Pixel;
use embedded_graphics::draw_target::DrawTarget;
use embedded_graphics::geometry::{OriginDimensions, Point, Size};
use embedded_graphics::mono_font::MonoTextStyle;
use embedded_graphics::mono_font::iso_8859_1::{FONT_7X13, FONT_9X15_BOLD};
use embedded_graphics::pixelcolor::{Rgb888, RgbColor};
use embedded_graphics::primitives::{Line, PrimitiveStyle, StyledDrawable};
use embedded_graphics::text::{Alignment, Text};

use super::canvas::{Anchor, Canvas, Ink, Words};
use super::pixels::Raster;

impl OriginDimensions for Raster {
    fn size(&self) -> Size {
        Size::new(self.width as u32, self.height as u32)
    }
}

impl DrawTarget for Raster {
    type Color = Rgb888;
    type Error = Infallible;

    fn draw_iter<I: IntoIterator<Item = Pixel<Rgb888>>>(&mut self, pixels: I) -> Result<(), Infallible> {
        for Pixel(Point { x, y }, colour) in pixels {
            if let (Ok(x), Ok(y)) = (usize::try_from(x), usize::try_from(y)) {
                self.fill((x, y), (1, 1), [colour.r(), colour.g(), colour.b()]);
            }
        }
        Ok(())
    }
}

fn colour(ink: Ink) -> Rgb888 {
    let [r, g, b] = ink.rgb();
    Rgb888::new(r, g, b)
}

fn point((x, y): (f64, f64)) -> Point {
    Point::new(x.round() as i32, y.round() as i32)
}

impl Canvas for Raster {
    fn rect(&mut self, (x, y, width, height): (f64, f64, f64, f64), ink: Ink) {
        let (x, y, width, height) = (x.round() as usize, y.round() as usize, width.round() as usize, height.round() as usize);
        self.fill((x, y), (width, height), ink.rgb());
    }

    fn line(&mut self, from: (f64, f64), to: (f64, f64), ink: Ink) {
        let Ok(()) = Line::new(point(from), point(to)).draw_styled(&PrimitiveStyle::with_stroke(colour(ink), 1), self);
    }

    fn text(&mut self, at: (f64, f64), words: &str, Words { size, ink, anchor, is_bold }: Words) {
        let font = if is_bold || size > 13.0 { &FONT_9X15_BOLD } else { &FONT_7X13 };
        let alignment = match anchor {
            Anchor::Start => Alignment::Left,
            Anchor::Middle => Alignment::Center,
            Anchor::End => Alignment::Right,
        };
        let Ok(_) = Text::with_alignment(words, point(at), MonoTextStyle::new(font, colour(ink)), alignment).draw(self);
    }

    fn image(&mut self, (x, y): (f64, f64), image: &Raster) {
        for (row, pixels) in image.pixels.chunks(image.width.max(1)).enumerate() {
            for (column, &pixel) in pixels.iter().enumerate() {
                self.fill((x.round() as usize + column, y.round() as usize + row), (1, 1), pixel);
            }
        }
    }
}
