// Package web holds the pages that the gateway serves: embedded, each one file
// without anything from elsewhere.
package web

import (
	"bytes"
	_ "embed"
	"html/template"
)

//go:embed live.html
var liveSource string

var livePage = template.Must(template.New("live").Parse(liveSource))

// LiveSettings are what the live view has to know; the token it takes from its
// own address.
type LiveSettings struct {
	Nonce     string // of its script and style (Content Security Policy level 3)
	SessionID string
	Browser   bool
	Shell     bool
}

// Live makes the live view's page.
func Live(s LiveSettings) ([]byte, error) {
	var b bytes.Buffer
	err := livePage.Execute(&b, s)
	return b.Bytes(), err
}

// LivePolicy is the Content-Security-Policy of the page: its own script and
// style, its own sockets, framed by nobody but us.
func LivePolicy(nonce string) string {
	return "default-src 'none'; script-src 'nonce-" + nonce + "'; style-src 'nonce-" + nonce +
		"'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
}
