/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Adds sections to the search: Sphinx lists pages, and of sections only those that are titled almost as the query.
 * Here a section is found if its title has all words of the query, and stands above the pages.
 */
if (typeof Search !== "undefined") {
	const findPages = Search.performTermsSearch;

	Search.performTermsSearch = (wanted, excluded) => {
		const { alltitles, docnames, filenames, titles } = Search._index;
		const stemmer = new Stemmer();
		const results = findPages(wanted, excluded);

		for (const [title, places] of Object.entries(alltitles)) {
			const words = splitQuery(title.toLowerCase()).map((word) => stemmer.stemWord(word));

			if (!wanted.size || ![...wanted].every((word) => words.includes(word))) continue;
			for (const [page, anchor] of places) {
				if (anchor === null) continue; // the title of a page, which Sphinx knows
				results.push([
					docnames[page],
					`${titles[page]} > ${title}`,
					`#${anchor}`,
					null,
					Scorer.title + 1,
					filenames[page],
					SearchResultKind.title,
				]);
			}
		}
		return results;
	};
}
