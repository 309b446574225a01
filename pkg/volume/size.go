package volume

import (
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"
)

// defaultBytes is promised to a volume for which no size was asked.
const defaultBytes = 1 << 30

// Unknown stands for a number that is not known, or not counted.
const Unknown = -1

// MaxBytes is more than any volume or pool has. Larger numbers are not the same to all
// who read JSON (RFC 8259, section 6), and sums of many of them would overflow.
const MaxBytes = 1 << 53

// A Range is the size that a caller asks for, in bytes: at least Required and,
// unless it is 0, at most Limit.
type Range struct{ Required, Limit int64 }

// Promise is the size to set aside, in bytes: what was asked, in whole blocks.
func (r Range) Promise(block int64) (int64, error) {
	if err := r.Check(); err != nil {
		return 0, err
	}
	want := r.Required
	if want == 0 {
		want = defaultBytes
		if r.Limit > 0 && r.Limit < want {
			want = r.Limit / block * block
		}
	}
	if r.Limit > 0 && r.Limit < block {
		return 0, fmt.Errorf("%w: the limit of %d bytes is less than one block of %d", ErrOutOfRange, r.Limit, block)
	}
	if want > MaxBytes-block {
		return 0, fmt.Errorf("%w: %d bytes", ErrOutOfRange, want)
	}
	bytes := max(1, (want+block-1)/block) * block
	if r.Limit > 0 && bytes > r.Limit {
		return 0, fmt.Errorf("%w: %d bytes are %d in whole blocks, more than the limit of %d", ErrOutOfRange, want, bytes, r.Limit)
	}
	return bytes, nil
}

// Check reports a range that no size can satisfy. Errors: ErrInvalid, ErrOutOfRange.
func (r Range) Check() error {
	switch {
	case r.Required < 0 || r.Limit < 0:
		return fmt.Errorf("%w: a size is negative (required %d, limit %d)", ErrInvalid, r.Required, r.Limit)
	case r.Limit > 0 && r.Required > r.Limit:
		return fmt.Errorf("%w: %d bytes are required, but at most %d allowed", ErrOutOfRange, r.Required, r.Limit)
	}
	return nil
}

// Allows reports whether a volume of that many bytes is what the range asks for.
func (r Range) Allows(bytes int64) bool {
	return bytes >= r.Required && (r.Limit == 0 || bytes <= r.Limit)
}

// suffixes are those of Kubernetes quantities.
var suffixes = map[string]int64{
	"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
	"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50, "Ei": 1 << 60,
}

// ParseBytes reads a quantity as Kubernetes writes sizes ("10Gi", "1.5G", "4096",
// "1e9") and rounds it up to whole bytes.
func ParseBytes(s string) (int64, error) {
	bad := fmt.Errorf("%w: %q is not a size such as 10Gi or 500M", ErrInvalid, s)
	number := strings.TrimRight(s, "kKMGTPEi")
	unit, ok := suffixes[s[len(number):]]
	if !ok || number == "" || len(number) > 30 || strings.Trim(number, "0123456789.e+") != "" {
		return 0, bad
	}
	// The exponent is bounded by hand: big.Rat would compute any.
	if _, exponent, found := strings.Cut(number, "e"); found {
		if e, err := strconv.Atoi(exponent); err != nil || e > 18 {
			return 0, bad
		}
	}
	value, ok := new(big.Rat).SetString(number)
	if !ok {
		return 0, bad
	}
	value.Mul(value, new(big.Rat).SetInt64(unit))
	rounded := new(big.Int).Add(value.Num(), new(big.Int).Sub(value.Denom(), big.NewInt(1)))
	rounded.Quo(rounded, value.Denom())
	if !rounded.IsInt64() {
		return 0, fmt.Errorf("%w: %q", ErrOutOfRange, s)
	}
	return rounded.Int64(), nil
}

// A Reserve is what stays free in a pool: bytes, or a share of its size.
type Reserve struct {
	bytes   int64
	percent float64
}

// ParseReserve takes a quantity ("5Gi") or a percentage ("5%").
func ParseReserve(s string) (Reserve, error) {
	share, isPercent := strings.CutSuffix(s, "%")
	if !isPercent {
		bytes, err := ParseBytes(s)
		return Reserve{bytes: bytes}, err
	}
	percent, err := strconv.ParseFloat(share, 64)
	if err != nil || math.IsNaN(percent) || percent < 0 || percent > 100 {
		return Reserve{}, fmt.Errorf("%w: %q is not a percentage from 0%% to 100%%", ErrInvalid, s)
	}
	return Reserve{percent: percent}, nil
}

// Of is the reserve, in bytes, of a pool of that size: at most all of it.
func (r Reserve) Of(size int64) int64 {
	if r.percent == 0 {
		return min(r.bytes, size)
	}
	share := float64(size) * r.percent / 100
	if share >= float64(size) {
		return size // which a float may not represent
	}
	return int64(share)
}
