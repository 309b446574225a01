package main

import (
	"cmp"
	"errors"
	"image"
	"image/color"
	"image/png"
	"maps"
	"os"
	"slices"
)

// reduce writes a picture with no more than 256 colours, which is a third of the size.
func reduce(from, to string) error {
	source, err := os.Open(from)
	if err != nil {
		return err
	}
	defer source.Close()
	full, err := png.Decode(source)
	if err != nil {
		return err
	}
	target, err := os.Create(to)
	if err != nil {
		return err
	}
	encoder := png.Encoder{CompressionLevel: png.BestCompression}
	return errors.Join(encoder.Encode(target, paletted(full)), target.Close())
}

func paletted(full image.Image) *image.Paletted {
	bounds := full.Bounds()
	often := map[color.RGBA]int{}
	at := func(x, y int) color.RGBA { return color.RGBAModel.Convert(full.At(x, y)).(color.RGBA) }
	for y := bounds.Min.Y; y < bounds.Max.Y; y++ {
		for x := bounds.Min.X; x < bounds.Max.X; x++ {
			often[at(x, y)]++
		}
	}
	byCount := slices.SortedFunc(maps.Keys(often), func(a, b color.RGBA) int {
		return cmp.Or(often[b]-often[a], cmp.Compare(packed(a), packed(b)))
	})
	palette := choose(byCount)
	nearest := make(map[color.RGBA]uint8, len(byCount))
	for _, c := range byCount {
		nearest[c] = uint8(palette.Index(c))
	}
	small := image.NewPaletted(bounds, palette)
	for y := bounds.Min.Y; y < bounds.Max.Y; y++ {
		for x := bounds.Min.X; x < bounds.Max.X; x++ {
			small.SetColorIndex(x, y, nearest[at(x, y)])
		}
	}
	return small
}

func packed(c color.RGBA) uint32 {
	return uint32(c.R)<<16 | uint32(c.G)<<8 | uint32(c.B)
}

// choose takes the first colours, and of the others those that are least like what is
// taken already: a red number is rare, and has to stay red.
func choose(colours []color.RGBA) color.Palette {
	const first, all = 128, 256
	var palette color.Palette
	for _, c := range colours[:min(first, len(colours))] {
		palette = append(palette, c)
	}
	unlike := make([]int, len(colours)) // to the nearest that is taken
	for i, c := range colours {
		unlike[i] = distance(c, palette.Convert(c).(color.RGBA))
	}
	for len(palette) < min(all, len(colours)) {
		next := colours[slices.Index(unlike, slices.Max(unlike))]
		palette = append(palette, next)
		for i, c := range colours {
			unlike[i] = min(unlike[i], distance(c, next))
		}
	}
	return palette
}

func distance(a, b color.RGBA) int {
	r, g, bl := int(a.R)-int(b.R), int(a.G)-int(b.G), int(a.B)-int(b.B)
	return r*r + g*g + bl*bl
}
