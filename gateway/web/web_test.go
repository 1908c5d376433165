package web

import (
	"regexp"
	"strings"
	"testing"
)

func TestLiveIsSelfContained(t *testing.T) {
	b, err := Live(LiveSettings{Nonce: "n0nce", SessionID: `"><script>alert(1)</script>`, Browser: true})
	if err != nil {
		t.Fatal(err)
	}
	page := string(b)
	if strings.Count(page, `nonce="n0nce"`) != 2 || strings.Count(page, "<script") != 1 {
		t.Error("a script or style without the nonce")
	}
	if !strings.Contains(page, `data-browser="true" data-shell="false"`) {
		t.Error("the settings are not in the page")
	}
	if m := regexp.MustCompile(`(?i)(src|href|style|onclick)\s*=\s*"|url\(|@import|https?://[a-z0-9]`).FindAllString(page, -1); len(m) > 0 {
		t.Errorf("something from elsewhere, or what the policy forbids: %q", m)
	}
}

func TestLivePolicy(t *testing.T) {
	p := LivePolicy("n0nce")
	for _, want := range []string{"default-src 'none'", "script-src 'nonce-n0nce'", "frame-ancestors 'self'"} {
		if !strings.Contains(p, want) {
			t.Errorf("%q is not in %q", want, p)
		}
	}
	if strings.Contains(p, "unsafe") {
		t.Error("unsafe")
	}
}
