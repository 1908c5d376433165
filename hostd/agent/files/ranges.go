package files

import (
	"net/http"
	"regexp"
	"strconv"
	"strings"
)

// rangesForm is the ranges-specifier of RFC 9110 14.1.1 with a unit we know.
// Empty members of the list are allowed (5.6.1.2).
var (
	rangesForm = regexp.MustCompile(`^bytes=[ \t]*(,[ \t]*)*` + rangeForm + `([ \t]*,([ \t]*` + rangeForm + `)?)*[ \t]*$`)
	beyondInt  = regexp.MustCompile(`[1-9][0-9]{18,}`)
)

const rangeForm = `([0-9]+-[0-9]*|-[0-9]+)`

// largestBound stands for a bound that no integer holds: past every file's end.
const largestBound = "999999999999999999"

// understandRange drops a Range header that is not understood: it "is ignored"
// (RFC 9110 14.2), where http.ServeContent would answer 416. What a file cannot
// satisfy stays, for a 416 that tells the file's length.
func understandRange(h http.Header) {
	text := h.Get("Range")
	if text == "" {
		return
	}
	text = beyondInt.ReplaceAllString(text, largestBound)
	if !rangesForm.MatchString(text) || backwards(text) {
		h.Del("Range")
		return
	}
	h.Set("Range", text)
}

// backwards says whether a range ends before it begins, which makes the header
// invalid (14.1.1).
func backwards(text string) bool {
	for spec := range strings.SplitSeq(strings.TrimPrefix(text, "bytes="), ",") {
		first, last, _ := strings.Cut(strings.Trim(spec, " \t"), "-")
		from, err1 := strconv.ParseInt(first, 10, 64)
		to, err2 := strconv.ParseInt(last, 10, 64)
		if err1 == nil && err2 == nil && to < from {
			return true
		}
	}
	return false
}
