package accounts

import (
	"fmt"
	"strings"
)

// Seconds is an amount of time in milliseconds; in JSON it is seconds, exact to
// the last digit.
type Seconds int64

// String gives seconds in decimal.
func (s Seconds) String() string { return decimal(int64(s), 3) }

// MarshalJSON writes seconds.
func (s Seconds) MarshalJSON() ([]byte, error) { return []byte(s.String()), nil }

// Gigabytes is an amount of bytes; in JSON it is GB of 1,000,000,000 bytes,
// exact to the last digit.
type Gigabytes int64

// String gives gigabytes in decimal.
func (g Gigabytes) String() string { return decimal(int64(g), 9) }

// MarshalJSON writes gigabytes.
func (g Gigabytes) MarshalJSON() ([]byte, error) { return []byte(g.String()), nil }

// decimal writes n, which is not below zero, with a point before its last digits
// and without zeros at the end.
func decimal(n int64, digits int) string {
	text := fmt.Sprintf("%0*d", digits+1, n)
	point := len(text) - digits
	return strings.TrimSuffix(strings.TrimRight(text[:point]+"."+text[point:], "0"), ".")
}
