//! Pixels, and PNG.

pub type Rgb = [u8; 3];

/// A picture of pixels, row after row.
pub(super) struct Raster {
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) pixels: Vec<Rgb>,
}

impl Raster {
    /// White paper.
    pub(super) fn new(width: usize, height: usize) -> Self {
        Self { width, height, pixels: vec![[0xff; 3]; width * height] }
    }

    /// Colours a rectangle; what lies outside is left out.
    pub(super) fn fill(&mut self, (x, y): (usize, usize), (width, height): (usize, usize), rgb: Rgb) {
        for row in y..(y + height).min(self.height) {
            self.pixels[row * self.width..][x.min(self.width)..(x + width).min(self.width)].fill(rgb);
        }
    }

    pub(super) fn to_png(&self) -> Vec<u8> {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, self.width as u32, self.height as u32);
        encoder.set_color(png::ColorType::Rgb);
        let written = encoder.write_header().and_then(|mut writer| writer.write_image_data(self.pixels.as_flattened()));
        // Memory takes what is written, and the pixels are as many as the header says.
        debug_assert!(written.is_ok());
        file
    }
}
