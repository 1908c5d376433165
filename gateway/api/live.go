package api

import (
	"crypto/rand"
	"net/http"

	"github.com/berth-dev/berth/gateway/web"
	"github.com/berth-dev/berth/shared/token"
)

// liveView answers with the page; its sockets carry the token again.
func (c *call) liveView() error {
	s, err := c.openByToken(token.Live)
	if err != nil {
		return err
	}
	nonce := rand.Text()
	page, err := web.Live(web.LiveSettings{Nonce: nonce, SessionID: s.ID, Browser: s.Kind.HasBrowser(), Shell: s.Kind.HasShell()})
	if err != nil {
		return err
	}
	c.head(http.StatusOK, "text/html; charset=utf-8")
	h := &c.rc.Response.Header
	h.Set("Content-Security-Policy", web.LivePolicy(nonce))
	h.Set("Referrer-Policy", "no-referrer") // the address holds the token
	c.rc.SetBody(page)
	return nil
}
