package session

import (
	"fmt"
	"strings"
)

// Sizes are the machines' sizes by kind. As text, in flags and environment:
// "browser=1x2,shell=1x1,both=1x3", vCPUs times GiB of memory. What the text
// leaves out has the default size.
type Sizes map[Kind]Size

// DefaultSizes are the sizes of decisions.md "API manners".
var DefaultSizes = Sizes{
	Browser: {VCPU: 1, GiB: 2},
	Shell:   {VCPU: 1, GiB: 1},
	Both:    {VCPU: 1, GiB: 3},
}

const maxSize = 1024 // vCPUs and GiB, against slips of the finger

// UnmarshalText reads sizes; the error names the item and what would be right.
func (s *Sizes) UnmarshalText(text []byte) error {
	sizes := Sizes{}
	for k, size := range DefaultSizes {
		sizes[k] = size
	}
	for item := range strings.SplitSeq(string(text), ",") {
		item = strings.TrimSpace(item)
		if item == "" {
			continue
		}
		name, rest, _ := strings.Cut(item, "=")
		var size Size
		n, err := fmt.Sscanf(rest+"\n", "%dx%d\n", &size.VCPU, &size.GiB)
		if _, known := DefaultSizes[Kind(name)]; !known || err != nil || n != 2 ||
			size.VCPU < 1 || size.GiB < 1 || size.VCPU > maxSize || size.GiB > maxSize {
			return fmt.Errorf("%q: want KIND=VCPUSxGIB, such as browser=1x2, with KIND one of browser, shell, both", item)
		}
		sizes[Kind(name)] = size
	}
	*s = sizes
	return nil
}
