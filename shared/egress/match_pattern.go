package egress

import (
	"errors"
	"regexp"
	"regexp/syntax"
	"unicode/utf8"
)

// maxSteps bounds a compiled pattern: instructions, and ranges of character
// classes. Go's own bound lets a pattern of 256 characters take 128 MB and
// seconds; with this one the longest host name takes at most some milliseconds.
// 256 characters without counted repeats stay far below it.
const maxSteps = 4000

func parsePattern(r *Rule, v string) string {
	if utf8.RuneCountInString(v) > MaxPattern {
		return "be at most 256 characters long"
	}
	if _, err := compile(v); err != nil {
		return "be a regular expression (RE2): " + err.Error()
	}
	r.DomainPattern = v
	return ""
}

// compile makes a pattern that disregards case and is not anchored. Its size is
// looked at before it is compiled. The error completes a sentence.
func compile(pattern string) (*regexp.Regexp, error) {
	re, err := syntax.Parse(pattern, syntax.Perl|syntax.FoldCase)
	if err != nil {
		return nil, patternError(err)
	}
	if steps(re) > maxSteps {
		return nil, errors.New("its counted repeats make it too large")
	}
	compiled, err := regexp.Compile("(?i)" + pattern)
	if err != nil {
		return nil, patternError(err)
	}
	return compiled, nil
}

// patternError says what is wrong in words of the pattern alone.
func patternError(err error) error {
	var e *syntax.Error
	if errors.As(err, &e) {
		return errors.New(e.Code.String() + " in " + shown(e.Expr))
	}
	return err
}

// steps counts what compiling a pattern comes to, at most a little over maxSteps.
func steps(re *syntax.Regexp) int {
	n := 1
	switch re.Op {
	case syntax.OpLiteral:
		n += len(re.Rune)
	case syntax.OpCharClass:
		n += len(re.Rune) / 2
	}
	for _, sub := range re.Sub {
		if n += steps(sub); n > maxSteps {
			return n
		}
	}
	if re.Op == syntax.OpRepeat {
		n *= max(re.Min+1, re.Max)
	}
	return n
}
